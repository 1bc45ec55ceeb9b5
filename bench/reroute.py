"""From a node's word that it leaves to the first byte of the next answer from its standby, on every way there is.

Prints one JSON object per line. `reroute_ms` is from the signal's publication at the node to the first byte of the
next answer that the standby gives; a prober always has its next request ready, so a request's own time is part of
it. Beside it `--flows` keep-alive connections of the same door ask now and then, and look at every byte. `ratio` is
the median over that of the first line. All ways are measured in turn in one run, `--rounds` times.

    kernel            steered port in the kernel; on the gateway's host: the node writes the pinned map, then sends
    kernel_pinned     the pinned map alone, as with HAProxy: one switch, and nobody else is told
    kernel_datagram   the same port, node on another host: datagram and Redis stream
    kernel_stream     the Redis stream alone
    kernel_celery     a Celery task alone, whose worker writes the pinned map
    relay             steered port in user space, datagram and Redis stream
    haproxy           HAProxy with a backup server, switched through its runtime API over an open connection

The last lines are the flip itself, inside the gateway, at 10 and at 10,000 live connections.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apex.local.valkey import EmbeddedValkey
from bench.support.reroute_ways import CeleryTask, HAProxy
from kernel_steer.engine import EngineUnavailable, select_engine
from kernel_steer.measure.backend import NODES
from kernel_steer.measure.carriers import ALL, FROM_ELSEWHERE, Announcer, Carrier
from kernel_steer.measure.machine import Part, raise_file_limit
from kernel_steer.measure.ports import REQUESTS_PER_S, Signals, measure
from kernel_steer.measure.result import percentiles
from kernel_steer.measure.steered import run_ports
from kernel_steer.measure.story import Visitors, Way, flip_many, start_backends

_FILES = 65536
_FLIP_FLOWS = (10, 10_000)


@dataclass(slots=True)
class Row:
    """One way through one door."""

    name: str
    door: str
    way: Way


class Doors:
    """Those that can be opened here, each with its live connections; `skipped` says why others cannot."""

    def __init__(self, redis_url: str, flows: int, wanted: Sequence[str]) -> None:
        self.rows: list[Row] = []
        self.visitors: dict[str, Visitors] = {}
        self.skipped: dict[str, str] = {}
        self._stack = ExitStack()
        self._context = multiprocessing.get_context("spawn")
        self._redis_url = redis_url
        self._flows = flows
        self._backends = start_backends(self._context)
        for part in self._backends:
            self._stack.callback(part.end)
        for name, open_door in (
            ("kernel", self._open_kernel),
            ("relay", self._open_relay),
            ("haproxy", self._open_haproxy),
        ):
            if name not in wanted:
                continue
            try:
                open_door()
            except (EngineUnavailable, FileNotFoundError) as error:
                self.skipped[name] = str(error)

    def _open_kernel(self) -> None:
        select_engine("kernel").engine.close()  # says why it cannot run before a process is made
        url, announcer, pins = self._open_ports("kernel", database=1)
        for name, carriers in (
            ("kernel", ALL),
            ("kernel_pinned", frozenset({Carrier.PINNED})),
            ("kernel_datagram", FROM_ELSEWHERE),
            ("kernel_stream", frozenset({Carrier.STREAM})),
        ):
            self.rows.append(Row(name, "kernel", Signals(announcer, carriers)))
        task = CeleryTask(self._context, url, pins)
        self._stack.callback(task.stop)
        self.rows.append(Row("kernel_celery", "kernel", task))

    def _open_relay(self) -> None:
        _, announcer, _ = self._open_ports("relay", database=2)
        self.rows.append(Row("relay", "relay", Signals(announcer, FROM_ELSEWHERE)))

    def _open_ports(self, engine: str, *, database: int) -> tuple[str, Announcer, str]:
        # A database each: otherwise one door's signals would flip the other too.
        url, key = f"{self._redis_url}?db={database}", secrets.token_bytes(32)
        gateway = Part(
            self._context,
            run_ports,
            engine,
            [part.first for part in self._backends],
            url,
            key,
            self._flows + 1,
        )
        self._stack.callback(gateway.end)
        port, _, pins = gateway.first
        announcer = Announcer(url, key, NODES[0])
        self._stack.callback(announcer.stop)
        announcer.wait_for_gateways(1, pinned=bool(pins))
        self._let_in(engine, port)
        return url, announcer, pins

    def _open_haproxy(self) -> None:
        haproxy = HAProxy([part.first for part in self._backends])
        self._stack.callback(haproxy.stop)
        self._let_in("haproxy", haproxy.port)
        self.rows.append(Row("haproxy", "haproxy", haproxy))

    def _let_in(self, door: str, port: int) -> None:
        self.visitors[door] = Visitors(self._context, [port], flows=self._flows, per_s=REQUESTS_PER_S)
        self._stack.callback(self.visitors[door].end)

    def close(self) -> None:
        self._stack.close()


def compare(doors: Doors, *, flips: int, rounds: int) -> Iterator[dict[str, Any]]:
    times: dict[str, list[float]] = {row.name: [] for row in doors.rows}
    for _ in range(rounds):
        for row in doors.rows:
            times[row.name] += flip_many(doors.visitors[row.door], row.way, flips // rounds)
    seen = {name: asdict(visitors.leave()) for name, visitors in doors.visitors.items()}
    first = statistics.median(times[doors.rows[0].name])
    for row in doors.rows:
        figures = times[row.name]
        yield {
            "bench": "reroute",
            "way": row.name,
            "flips": len(figures),
            "reroute_ms": percentiles(figures) | {"max": round(max(figures), 3)},
            "ratio": round(statistics.median(figures) / first, 2),
            # What the connections of a door have seen over all of its ways.
            "door": row.door,
            "connections": seen[row.door],
        }
    for name, reason in doors.skipped.items():
        yield {"bench": "reroute", "door": name, "skipped": reason}


def flip_times(redis_url: str, *, flips: int) -> Iterator[dict[str, Any]]:
    """Inside the gateway, from a datagram's reader thread: what `Engine.flip` takes."""
    for flows in _FLIP_FLOWS:
        result = measure(
            engine="kernel", flows=flows, flips=flips, redis_url=redis_url, carriers=FROM_ELSEWHERE
        )
        yield {"bench": "flip", **result.as_json()}


@contextmanager
def own_valkey() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="apex-bench-") as folder:
        server = EmbeddedValkey(data=Path(folder) / "data", sockets=Path(folder) / "run")
        process = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
        try:
            server.wait_ready(process)
            yield server.url
        finally:
            process.terminate()
            process.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--flows", type=int, default=1000, help="live connections of each door")
    parser.add_argument("--flips", type=int, default=1000, help="of each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--doors", nargs="+", choices=("kernel", "relay", "haproxy"), default=["kernel", "relay", "haproxy"]
    )
    parser.add_argument("--no-flip-times", action="store_true", help="leave the last lines out")
    given = parser.parse_args()
    raise_file_limit(_FILES)
    with own_valkey() as redis_url:
        doors = Doors(redis_url, given.flows, given.doors)
        try:
            for figures in compare(doors, flips=given.flips, rounds=given.rounds):
                print(json.dumps(figures), flush=True)
        finally:
            doors.close()
        if not given.no_flip_times and "kernel" not in doors.skipped:
            for figures in flip_times(redis_url, flips=min(given.flips, 200)):
                print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
