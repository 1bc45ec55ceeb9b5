"""What a steered port costs: the same keep-alive requests direct, through the kernel and through user space.

Prints one JSON object. Each way is a process of its own; the ways take turns, `--rounds` times, and the medians
are given. `p50_us` and `p99_us` are round trips of one client that asks again and again, `gateway_us` is CPU of the
gateway's process per request. `answered_while_flipping` are requests, each answered whole, while the primary is
flipped away and back every 10 ms.
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
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.support.processes import Part
from kernel_steer.engine import EngineUnavailable, select_engine
from kernel_steer.engine.base import NodeKey
from kernel_steer.ports import Backend, Endpoint, Mode, PortServer

WAYS = ("direct", "kernel", "relay")
FLIP_EVERY_S = 0.01
_WARM_UP = 200
_QUESTION, _ANSWER = b"q" * 200, b"a" * 200
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_QUESTION), _QUESTION)
)
_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_ANSWER),
    _ANSWER,
)


def run_node(pipe: Connection) -> None:
    """Answers each request at once; requests are small enough to come in one piece."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is listener:
                accepted, _ = listener.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(accepted, selectors.EVENT_READ)
            elif sock.recv(65536):
                sock.send(_RESPONSE)
            else:
                selector.unregister(sock)
                sock.close()


def run_port(pipe: Connection, way: str, nodes: tuple[int, int], flips: bool) -> None:
    """A gateway's port; with `flips`, its primary is flipped away and back all the time."""

    async def main() -> None:
        engine = select_engine(way).engine
        server = PortServer(engine)
        keys = NodeKey("a", 1), NodeKey("b", 1)
        primary, standby = (Backend(key, "127.0.0.1", port) for key, port in zip(keys, nodes, strict=True))
        await server.apply([Endpoint("bench", 0, Mode.HTTP, primary, standby)])
        pipe.send(server.number_of("bench"))
        while True:
            await asyncio.sleep(FLIP_EVERY_S)
            if flips:
                engine.flip(keys[0])
                await asyncio.sleep(FLIP_EVERY_S)
                engine.restore(keys[0])

    uvloop.run(main())


def ask(port: int, count: int) -> list[float]:
    """Microseconds of each request, in order. Raises AssertionError for an answer that is not whole."""
    took = []
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_WARM_UP + count):
            started = time.perf_counter_ns()
            sock.send(_REQUEST)
            got = b""
            while len(got) < len(_RESPONSE):
                got += sock.recv(65536)
            took.append((time.perf_counter_ns() - started) / 1000)
            assert got == _RESPONSE
    return took[_WARM_UP:]


def measure(way: str, port: int, part: Part, count: int) -> dict[str, float]:
    before = part.cpu_s()
    took = sorted(ask(port, count))
    spent = (part.cpu_s() - before) / (count + _WARM_UP) * 1e6
    found = {"p50_us": took[len(took) // 2], "p99_us": took[int(len(took) * 0.99)]}
    return found if way == "direct" else found | {"gateway_us": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    nodes = [Part(run_node) for _ in range(2)]
    ports = (nodes[0].port, nodes[1].port)
    parts = {"direct": nodes[0]}
    try:
        for way in WAYS[1:]:
            parts[way] = Part(run_port, way, ports, False)
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in parts}
        for _ in range(options.rounds):
            for way, part in parts.items():
                rounds[way].append(measure(way, part.port, part, options.requests))
        flipping = parts["flipping"] = Part(run_port, "kernel", ports, True)
        answered = len(ask(flipping.port, options.requests))
    except (EOFError, EngineUnavailable) as error:
        raise SystemExit(f"a port could not be opened: {error or 'its process says why'}") from error
    finally:
        for part in {*parts.values(), *nodes}:
            part.stop()
    ways = {
        way: {name: round(statistics.median(each[name] for each in found), 1) for name in found[0]}
        for way, found in rounds.items()
    }
    print(json.dumps({"ways": ways, "answered_while_flipping": answered, "requests": options.requests}))


if __name__ == "__main__":
    main()
