"""Our gateway and LiteLLM's proxy in front of the same nodes, in turns, in one run.

Prints one JSON object. Each door has one process and no database: ours has its business in memory, LiteLLM one master
key. `added_ms` is time to the first word of a stream above a direct connection, one stream at a time; `answers_per_s`
are answers without streaming; `streams_per_s` are streams of 20 chunks, 10 ms apart. The load generator, the nodes
and the door share the machine: read the ratios. LiteLLM is skipped with a reason where it is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.support import litellm_proxy
from bench.support.doors import run_gateway
from bench.support.fast_node import run_node
from bench.support.load import Caller, rate, request_bytes
from bench.support.processes import Part
from kernel_steer.engine import select_engine

CHUNKS, CHUNK_GAP_S = 20, 0.010
_KEY = "apx_test_good"


@dataclass(frozen=True)
class Door:
    """Where nodes that answer at once are reached, and where those that take their time."""

    quick: int
    paced: int
    key: str = _KEY
    quick_model: str = "double"
    paced_model: str = "double"

    def request(self, *, stream: bool, tokens: int, paced: bool = False) -> bytes:
        model = self.paced_model if paced else self.quick_model
        return request_bytes(self.key, stream=stream, tokens=tokens, model=model)


async def first_words(doors: dict[str, Door], turns: int) -> dict[str, list[float]]:
    """Seconds to the first word, one stream at a time, doors in turn."""
    callers = {name: Caller(door.quick) for name, door in doors.items()}
    requests = {name: door.request(stream=True, tokens=3) for name, door in doors.items()}
    found: dict[str, list[float]] = {name: [] for name in doors}
    for turn in range(turns + 10):
        for name, caller in callers.items():
            first_s = await caller.ask(requests[name])
            if turn >= 10:  # the first ones open connections and warm caches
                found[name].append(first_s)
    for caller in callers.values():
        caller.close()
    return found


async def answers_per_s(door: Door, seconds: float) -> float:
    request = door.request(stream=False, tokens=20)
    return (await rate(door.quick, request, callers=16, seconds=seconds))["per_s"]


async def streams_per_s(door: Door, seconds: float) -> tuple[float, float]:
    """Streams a second, and milliseconds to the first word in the middle of that load."""
    request = door.request(stream=True, tokens=CHUNKS, paced=True)
    result = await rate(door.paced, request, callers=128, seconds=seconds)
    return result["per_s"], statistics.median(result["first_s"]) * 1000


def bytes_per_idle_stream(gateway: Part, port: int, streams: int) -> float:
    """Growth of the gateway's resident memory by streams that have begun and say nothing more."""

    async def open_and_wait() -> float:
        before = psutil.Process(gateway.process.pid).memory_info().rss
        writers = []
        for _ in range(streams):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(_KEY, stream=True, tokens=100_000))
            await reader.readuntil(b'"token_ids"')
            writers.append(writer)
        grown = psutil.Process(gateway.process.pid).memory_info().rss - before
        for writer in writers:
            writer.transport.abort()
        return grown / streams

    return uvloop.run(open_and_wait())


def measure(
    doors: dict[str, Door], *, turns: int, seconds: float, rounds: int
) -> dict[str, dict[str, float]]:
    firsts: dict[str, list[float]] = {name: [] for name in doors}
    rates: dict[str, dict[str, list[float]]] = {
        name: {"answers_per_s": [], "streams_per_s": [], "first_word_ms_under_load": []} for name in doors
    }
    for _ in range(rounds):
        for name, times in uvloop.run(first_words(doors, turns)).items():
            firsts[name] += times
        for name, door in doors.items():
            rates[name]["answers_per_s"].append(uvloop.run(answers_per_s(door, seconds)))
        for name, door in doors.items():
            per_s, first_ms = uvloop.run(streams_per_s(door, seconds))
            rates[name]["streams_per_s"].append(per_s)
            rates[name]["first_word_ms_under_load"].append(first_ms)
    out = {}
    for name in doors:
        out[name] = {"first_word_ms": round(statistics.median(firsts[name]) * 1000, 3)}
        if name != "direct":
            above = statistics.median(firsts[name]) - statistics.median(firsts["direct"])
            out[name]["added_ms"] = round(above * 1000, 3)
        out[name] |= {what: round(statistics.median(values), 1) for what, values in rates[name].items()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=60, help="single streams per door and round")
    parser.add_argument("--seconds", type=float, default=4.0, help="per door, kind of load and round")
    parser.add_argument("--idle-streams", type=int, default=500)
    parser.add_argument("--engine", choices=["auto", "kernel", "relay"], default="auto")
    parser.add_argument("--without-litellm", action="store_true")
    given = parser.parse_args()
    engine = select_engine(given.engine).engine
    engine.close()
    quick, paced, silent = Part(run_node), Part(run_node, CHUNK_GAP_S), Part(run_node, 600.0)
    parts = [quick, paced, silent]
    gateways = [Part(run_gateway, node.port, engine.name) for node in parts]
    doors = {
        "direct": Door(quick.port, paced.port),
        "gateway": Door(gateways[0].port, gateways[1].port),
    }
    out: dict[str, Any] = {"bench": "gateway_vs_litellm", "engine": engine.name, "rounds": given.rounds}
    rival = None
    try:
        if given.without_litellm:
            raise FileNotFoundError("not wanted")
        rival = litellm_proxy.LiteLLM({"quick": quick.port, "paced": paced.port})
        out["litellm_version"] = litellm_proxy.version()
        doors["litellm"] = Door(rival.port, rival.port, rival.key, "quick", "paced")
    except (FileNotFoundError, RuntimeError) as error:
        out["skipped"] = {"litellm": str(error)}
    try:
        out |= measure(doors, turns=given.turns, seconds=given.seconds, rounds=given.rounds)
        if rival is not None:
            for what in ("answers_per_s", "streams_per_s"):
                out[f"{what}_ratio"] = round(out["gateway"][what] / out["litellm"][what], 1)
        idle = bytes_per_idle_stream(gateways[2], gateways[2].port, given.idle_streams)
        out["gateway_kb_per_idle_stream"] = round(idle / 1000, 1)
        out["gateway_mb"] = round(psutil.Process(gateways[0].process.pid).memory_info().rss / 1e6)
        if rival is not None:
            out["litellm_mb"] = round(rival.rss_bytes() / 1e6)
    finally:
        if rival is not None:
            rival.stop()
        for part in [*gateways, *parts]:
            part.stop()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
