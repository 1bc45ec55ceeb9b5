"""What the gateway costs per token: the same streams direct from the node and through the relay engine.

Prints one JSON object. Times in microseconds of CPU per chunk and milliseconds to the first token; read
the ratios, the machine may be shared. The node is a loop that sends prepared chunks.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_steer.engine import EngineChoice
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.server import Connections, listen
from kernel_steer.resume.work import Limits
from tests.kernel_steer.engine_double import SCRIPT, EngineDouble
from tests.kernel_steer.harness import AdmissionDouble, Bench

STREAMS, CHUNKS, ROUNDS = 50, 200, 3
_BODY = json.dumps(
    {"model": "double", "messages": [{"role": "user", "content": "hi"}], "stream": True}
).encode()
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def run_node(pipe) -> None:
    chunks = [
        chunk
        for _, chunk in EngineDouble("a", script=SCRIPT[:1] * CHUNKS).body(
            "/v1/chat/completions", {"model": "double"}
        )
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for chunk in chunks:
            writer.write(chunk)
            await asyncio.sleep(0.001)
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


def run_gateway(pipe, node_port: int) -> None:
    async def main() -> None:
        bench = Bench(
            AdmissionDouble([EngineDouble("a", port=node_port)]), Path(tempfile.mkdtemp()), limits=Limits()
        )
        bench.journal.close()
        from kernel_steer.journal import Journal

        bench.journal = Journal(Path(tempfile.mkdtemp()) / "journal")
        gateway = Gateway(bench.services, bench.journal, EngineChoice(RelayEngine(), "bench"))
        listener = listen("127.0.0.1", 0)
        pipe.send(listener.getsockname()[1])
        await Connections(gateway, listener).accept()

    uvloop.run(main())


async def one_stream(port: int) -> tuple[float, int]:
    """Milliseconds to the first token, and chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.perf_counter()
    writer.write(_REQUEST)
    got, first = b"", 0.0
    while data := await reader.read(65536):
        got += data
        if not first and b'"token_ids"' in got:
            first = (time.perf_counter() - started) * 1000
    writer.close()
    return first, got.count(b'"token_ids"')


async def load(port: int) -> tuple[list[float], int]:
    results = await asyncio.gather(*(one_stream(port) for _ in range(STREAMS)))
    return [first for first, _ in results], sum(chunks for _, chunks in results)


def start(target, *arguments):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    return process, ours.recv()


def cpu_s(process) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def main() -> None:
    node, node_port = start(run_node)
    gateway, gateway_port = start(run_gateway, node_port)
    first = {"direct": [], "gateway": []}
    gateway_us, node_us = [], []
    for _ in range(ROUNDS):
        for name, port in (("direct", node_port), ("gateway", gateway_port)):
            before = cpu_s(gateway), cpu_s(node)
            times, chunks = uvloop.run(load(port))
            first[name].append(statistics.median(times))
            assert chunks == STREAMS * CHUNKS, chunks
            if name == "gateway":
                gateway_us.append((cpu_s(gateway) - before[0]) / chunks * 1e6)
            else:
                node_us.append((cpu_s(node) - before[1]) / chunks * 1e6)
    print(
        json.dumps(
            {
                "bench": "relay_overhead",
                "streams": STREAMS,
                "chunks_per_stream": CHUNKS,
                "gateway_cpu_us_per_chunk": round(statistics.median(gateway_us), 1),
                "node_cpu_us_per_chunk": round(statistics.median(node_us), 1),
                "first_token_ms_direct": round(statistics.median(first["direct"]), 2),
                "first_token_ms_gateway": round(statistics.median(first["gateway"]), 2),
            }
        )
    )
    for process in (gateway, node):
        process.terminate()


if __name__ == "__main__":
    main()
