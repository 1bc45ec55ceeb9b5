"""What carrying an answer costs: 200 streams at 30 chunks a second, through every door there is.

Prints one JSON object. `door_us` is CPU of the carrying process per chunk, `machine_us` that of the whole machine
per chunk, load generator included; `above_direct_us` is what the door adds to a direct connection. All doors
are measured in turn, `--rounds` times, and the medians are given. Other load on the machine shows in machine_us.
`growth` has the first figures again for 50 to 400 streams through our own gateway: per chunk they should stay the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.support.doors import open_door
from bench.support.processes import Part, machine_busy_s
from kernel_steer.engine import EngineUnavailable
from tests.kernel_steer.engine_double import SCRIPT, EngineDouble

DOORS = ("direct", "relay", "kernel", "nginx", "haproxy")
CHUNKS_PER_S = 30
GROWTH = (50, 100, 200, 400)
_BODY = json.dumps(
    {"model": "double", "messages": [{"role": "user", "content": "hi"}], "stream": True}
).encode()
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def run_node(pipe: Any, chunks_per_stream: int) -> None:
    """Sends every open stream its next chunk, 30 times a second."""
    double = EngineDouble("a", script=SCRIPT[:1] * (chunks_per_stream - 1))
    chunks = [chunk for _, chunk in double.body("/v1/chat/completions", {"model": "double"})]

    async def main() -> None:
        streams: dict[socket.socket, int] = {}
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        pipe.send(listener.getsockname()[1])

        async def serve(sock: socket.socket) -> None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            got = b""
            while b"\r\n\r\n" not in got:
                data = await loop.sock_recv(sock, 65536)
                if not data:
                    sock.close()
                    return
                got += data
            sock.send(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            streams[sock] = 0

        serving: set[asyncio.Task[None]] = set()

        async def accept() -> None:
            while True:
                sock, _ = await loop.sock_accept(listener)
                sock.setblocking(False)
                task = loop.create_task(serve(sock))
                serving.add(task)
                task.add_done_callback(serving.discard)

        accepting = loop.create_task(accept())
        due = time.monotonic()
        while not accepting.done():
            due += 1 / CHUNKS_PER_S
            await asyncio.sleep(max(0, due - time.monotonic()))
            for sock, position in list(streams.items()):
                if _is_over(sock, chunks, position):
                    sock.close()
                    del streams[sock]
                else:
                    streams[sock] = position + 1

    uvloop.run(main())


def _is_over(sock: socket.socket, chunks: list[bytes], position: int) -> bool:
    """Sends the chunk; true when it was the last or the reader has gone."""
    try:
        sock.send(chunks[position])
    except OSError:
        return True
    return position + 1 >= len(chunks)


def measure(port: int, streams: int, seconds: float, cpu_s: Any) -> tuple[float, float, int]:
    """(door CPU, machine CPU) in microseconds per chunk, and chunks, over `seconds` with all streams flowing."""
    selector = selectors.DefaultSelector()
    clients = []
    for _ in range(streams):
        client = socket.create_connection(("127.0.0.1", port))
        client.setblocking(False)
        client.send(_REQUEST)
        selector.register(client, selectors.EVENT_READ)
        clients.append(client)
    flowing: set[int] = set()
    while len(flowing) < streams:
        for key, _ in selector.select():
            if b'"token_ids"' in key.fileobj.recv(65536):  # type: ignore[union-attr]
                flowing.add(key.fd)
    before = cpu_s(), machine_busy_s()
    chunks, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for key, _ in selector.select(0.05):
            chunks += key.fileobj.recv(65536).count(b'"token_ids"')  # type: ignore[union-attr]
    after = cpu_s(), machine_busy_s()
    for client in clients:
        client.close()
    selector.close()
    return (after[0] - before[0]) / chunks * 1e6, (after[1] - before[1]) / chunks * 1e6, chunks


def _growth(door: Any, seconds: float) -> dict[int, dict[str, float]]:
    found = {}
    for streams in GROWTH:
        door_us, machine_us, _ = measure(door.port, streams, seconds, door.cpu_s)
        found[streams] = {"door_us": round(door_us, 2), "machine_us": round(machine_us, 1)}
        time.sleep(0.5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help=f"also with {GROWTH} streams")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    given = parser.parse_args()
    node = Part(run_node, int((given.seconds + 10) * CHUNKS_PER_S))
    doors: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name in given.doors:
        try:
            doors[name] = node if name == "direct" else open_door(name, node.port)
        except (FileNotFoundError, EngineUnavailable) as error:
            skipped[name] = str(error)
    results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in doors}
    for _ in range(given.rounds):
        for name, door in doors.items():
            results[name].append(measure(door.port, given.streams, given.seconds, door.cpu_s))
            time.sleep(0.5)  # closed streams end at the node before the next door is measured
    out: dict[str, Any] = {
        "bench": "spliced_answers",
        "streams": given.streams,
        "chunks_per_s": CHUNKS_PER_S,
        "rounds": given.rounds,
    }
    machine = {name: statistics.median(row[1] for row in rows) for name, rows in results.items()}
    for name, rows in results.items():
        out[name] = {"machine_us": round(machine[name], 1), "chunks": sum(row[2] for row in rows)}
        if name != "direct":
            out[name]["door_us"] = round(statistics.median(row[0] for row in rows), 2)
            if "direct" in machine:
                out[name]["above_direct_us"] = round(machine[name] - machine["direct"], 1)
    if given.growth:
        out["growth"] = {
            name: _growth(doors[name], given.seconds) for name in ("relay", "kernel") if name in doors
        }
    out["skipped"] = skipped
    print(json.dumps(out))
    for door in doors.values():
        door.stop()


if __name__ == "__main__":
    main()
