"""What one answer costs in memory on the kernel engine, with readers that read and with readers that never do.

Prints one JSON object, KB per flow: `process` is the gateway's own memory, `locked` a slot of the kernel's maps,
`sockets` what the kernel's two connections are made of, `queued` what waits in them (`ss`, most of it buffers around
few bytes). The far ends are not counted. Page cache that the journal's file is in is part of `process` while mapped.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.spliced_answers import _REQUEST, CHUNKS_PER_S, run_node
from bench.support.doors import open_door
from bench.support.processes import Part
from kernel_steer.engine.kernel.layout import FLOW_BYTES, RING_STRIDE

# What a gateway's two connections are made of, and what a sockhash and epoll have for them.
_OBJECTS = {"TCP": 2, "sock_inode_cache": 2, "filp": 2, "dentry": 2, "kmalloc-1k": 2, "eventpoll_epi": 3}
_QUEUES = re.compile(r"skmem:\(r(\d+),rb\d+,t\d+,tb\d+,f\d+,w(\d+)")


def _process_kb(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))


def _sockets_kb() -> float:
    rows = [line.split() for line in Path("/proc/slabinfo").read_text().splitlines()[2:]]
    return sum(int(row[3]) * _OBJECTS.get(row[0], 0) for row in rows) / 1024


def _queued_kb(door_port: int, node_port: int) -> float:
    """Of the gateway's ends alone."""
    asked = ["ss", "-tmnHO", "state", "established", f"( sport = :{door_port} or dport = :{node_port} )"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return sum(int(read) + int(written) for read, written in _QUEUES.findall(told)) / 1024


def measure(door: Any, node_port: int, flows: int, seconds: float, *, reading: bool) -> dict[str, float]:
    before = _process_kb(door.process.pid)
    clients = []
    for _ in range(flows):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", door.port))
        client.setblocking(False)
        client.send(_REQUEST)
        clients.append(client)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for client in clients if reading else ():
            try:
                client.recv(65536)
            except BlockingIOError:
                continue
        time.sleep(0.05)
    process = (_process_kb(door.process.pid) - before) / flows
    queued = _queued_kb(door.port, node_port) / flows
    for client in clients:
        client.close()
    parts = {
        "process": process,
        "locked": (RING_STRIDE + FLOW_BYTES) / 1024,
        "sockets": _sockets_kb(),
        "queued": queued,
    }
    parts["all"] = sum(parts.values())
    return {name: round(value, 1) for name, value in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flows", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    node = Part(run_node, int((given.seconds + 30) * CHUNKS_PER_S))
    out: dict[str, Any] = {"bench": "flow_memory", "flows": given.flows}
    for name, reading in (("reading", True), ("never_reading", False)):
        door = open_door("kernel", node.port)
        measure(door, node.port, 4, 1.0, reading=True)  # what a process needs once
        out[name] = measure(door, node.port, given.flows, given.seconds, reading=reading)
        door.stop()
    print(json.dumps(out))
    node.stop()


if __name__ == "__main__":
    main()
