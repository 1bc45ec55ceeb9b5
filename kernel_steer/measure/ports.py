"""Through a steered port: live keep-alive connections, a prober that never stops asking, and signals.

*reroute* is from the signal's publication at the listener to the first byte of the next answer that the
standby gives. The prober always has the next request ready, so a request's own time is part of it.
"""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Callable, Set

from kernel_steer.measure.backend import NODES
from kernel_steer.measure.carriers import ALL, Announcer, Carrier
from kernel_steer.measure.machine import BenchFailed, Part, own_database, raise_file_limit
from kernel_steer.measure.result import Result
from kernel_steer.measure.steered import run_ports
from kernel_steer.measure.story import Visitors, flip_many, start_backends
from kernel_steer.signals import STREAM, connect
from kernel_steer.signals.report import INDEX

REQUESTS_PER_S = 500.0
# Each connection has a socket of its client's and two of nodes. Where a process may not open as many files as that
# takes, the connections are spread over several gateways, and every flip is one in each of them.
_FILES_PER_FLOW = 3
_MORE_FILES = 1024


class Signals:
    """See Way: the primary's node announces it, on these carriers."""

    def __init__(self, announcer: Announcer, carriers: Set[Carrier]) -> None:
        self._announcer = announcer
        self._carriers = carriers

    def leave(self) -> int:
        """See Way."""
        return self._announcer.say(self._carriers, leaves=True)

    def come_back(self) -> None:
        """See Way."""
        self._announcer.say(self._carriers, leaves=False)


def measure(
    *,
    engine: str,
    flows: int,
    flips: int,
    redis_url: str,
    carriers: Set[Carrier] = ALL,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Starts two nodes and a gateway; makes `flips` flips beside `flows` live connections. Raises BenchFailed."""
    limit = raise_file_limit(_FILES_PER_FLOW * flows + _MORE_FILES)
    gateways = -(-flows * _FILES_PER_FLOW // (limit - _MORE_FILES))
    if flows + _MORE_FILES > limit:
        raise BenchFailed(f"a node must open {flows} files, this system allows {limit} (ulimit -n)")
    redis_url = own_database(redis_url)
    key, context = secrets.token_bytes(32), multiprocessing.get_context("spawn")
    doors: list[Part] = []
    nodes = start_backends(context)
    announcer: Announcer | None = None
    visitors: Visitors | None = None
    try:
        node_ports = [node.first for node in nodes]
        doors += [
            Part(context, run_ports, engine, node_ports, redis_url, key, flows + 1) for _ in range(gateways)
        ]
        ports, names, pins = zip(*(door.first for door in doors), strict=True)
        announcer = Announcer(redis_url, key, NODES[0])
        announcer.wait_for_gateways(gateways, pinned=sum(map(bool, pins)))
        say(f"{names[0]}, {flows} live connections over {gateways} gateways, {flips} flips")
        visitors = Visitors(context, ports, flows=flows, per_s=REQUESTS_PER_S)
        reroute_ms = flip_many(visitors, Signals(announcer, carriers), flips, say)
        seen = visitors.leave()
        flip_us = [time for door in doors for time in door.ask("times")]
        for door in doors:
            door.tell("stop")
        return Result(
            "ports",
            names[0],
            flows,
            flips,
            flip_us,
            reroute_ms,
            seen.resets,
            seen.bytes_lost,
            seen.bytes_duplicated,
        )
    finally:
        if announcer is not None:
            announcer.stop()
        if visitors is not None:
            visitors.end()
        for part in (*doors, *nodes):
            part.end()
        with connect(redis_url) as client:
            client.delete(STREAM, INDEX)
