"""A node is killed under an answer: how long until the gateway knows, and from then until the client reads on.

Prints one JSON object, times in milliseconds. Every round kills another node with -9 while one stream of a token
each 10 ms is on it; the standby goes on from the ids. `detection_ms` is from the signal to the moment at which the
gateway gives the node up, `resume_ms` from there to the next token at the client. On the double, so prefill is nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from multiprocessing import SimpleQueue
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.support.fast_node import OTHER_WORD, WORD, run_node
from bench.support.load import request_bytes
from bench.support.processes import Part
from kernel_steer.engine import select_engine
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.server import Connections, listen
from kernel_steer.journal import Journal
from kernel_steer.resume.circuit import Circuits
from kernel_steer.resume.tokens import TokenizerStore
from kernel_steer.resume.work import Services
from tests.kernel_steer.engine_double import EngineDouble
from tests.kernel_steer.harness import AdmissionDouble

TOKEN_GAP_S = 0.010
_TOKENS_BEFORE = 20
_KEY = "apx_test_good"


def run_gateway(pipe: Any, ports: list[int], engine: str, given_up: Any) -> None:
    """In front of all nodes, the first ones first; tells when it gives one up."""

    class Telling(Circuits):
        def failed(self, *about: Any, **more: Any) -> bool:
            given_up.put(time.monotonic())
            return super().failed(*about, **more)

    async def main() -> None:
        choice = select_engine(engine)
        folder = Path(tempfile.mkdtemp(prefix="apex-bench-"))
        nodes = [EngineDouble(f"node-{number}", port=port) for number, port in enumerate(ports)]
        services = Services(AdmissionDouble(nodes), choice.engine, TokenizerStore(folder), circuits=Telling())
        gateway = Gateway(services, Journal(folder / "journal"), choice)
        listener = listen("127.0.0.1", 0)
        pipe.send(listener.getsockname()[1])
        await Connections(gateway, listener).accept()

    uvloop.run(main())


async def lose_a_node(port: int, node: Part, next_word: str) -> tuple[float, float]:
    """When it was killed, and when the client read on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(_KEY, stream=True, tokens=1000))
    for _ in range(_TOKENS_BEFORE):
        await reader.readuntil(b'"token_ids"')
    assert node.process.pid is not None
    killed_at = time.monotonic()
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.join()
    await reader.readuntil(next_word.encode())
    now = time.monotonic()
    writer.transport.abort()
    return killed_at, now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engine", choices=["auto", "kernel", "relay"], default="auto")
    given = parser.parse_args()
    engine = select_engine(given.engine).engine
    engine.close()
    # Each has the next one as its standby, which says another word.
    sayings = [(WORD, OTHER_WORD)[number % 2] for number in range(given.rounds + 1)]
    nodes = [Part(run_node, TOKEN_GAP_S, word) for word in sayings]
    given_up: SimpleQueue[float] = SimpleQueue()
    gateway = Part(run_gateway, [node.port for node in nodes], engine.name, given_up)
    detection, resume, whole = [], [], []
    for node, next_word in zip(nodes, sayings[1:], strict=False):
        killed_at, read_on_at = uvloop.run(lose_a_node(gateway.port, node, next_word))
        while (known_at := given_up.get()) < killed_at:
            pass  # of a node that was killed before: it took no connection
        detection.append((known_at - killed_at) * 1000)
        resume.append((read_on_at - known_at) * 1000)
        whole.append((read_on_at - killed_at) * 1000)
    for part in [gateway, *nodes]:
        part.stop()
    print(
        json.dumps(
            {"bench": "resume_gap", "engine": engine.name, "rounds": given.rounds}
            | {
                name: {"p50": round(statistics.median(values), 2), "max": round(max(values), 2)}
                for name, values in (("detection_ms", detection), ("resume_ms", resume), ("gap_ms", whole))
            }
        )
    )


if __name__ == "__main__":
    main()
