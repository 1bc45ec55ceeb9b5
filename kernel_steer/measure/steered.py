"""The gateway's steered ports with two nodes behind one, and the real signal path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import uvloop

from kernel_steer.admission import Admission, FlipReport
from kernel_steer.engine import select_engine
from kernel_steer.engine.base import Engine, NodeKey
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.signal_path import SignalPath
from kernel_steer.gateway.steering import Steering
from kernel_steer.measure.backend import NODES
from kernel_steer.ports.endpoint import Backend, Endpoint, Mode
from kernel_steer.ports.server import PortServer

_PORT = "bench"


class Bystander:
    """The little of `Admission` that a signal touches."""

    def knows_node(self, name: str) -> bool:
        return name in NODES

    def node_draining(self, name: str, epoch: int) -> None: ...

    def node_restored(self, name: str, epoch: int) -> None: ...

    async def report_flip(self, report: FlipReport) -> None: ...


class Timed:
    """An engine whose flips are timed, in microseconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.flip_us: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def flip(self, node: NodeKey) -> int:
        started = time.perf_counter_ns()
        flows = self._engine.flip(node)
        self.flip_us.append((time.perf_counter_ns() - started) / 1000)
        return flows


def run_ports(
    pipe: Connection, engine: str, backend_ports: Sequence[int], redis_url: str, key: bytes, connections: int
) -> None:
    """Target of a process. Says (port, engine that carries it, folder of its pins or ""); then, whenever asked,
    the times of the flips since the last question."""
    uvloop.run(_serve(pipe, engine, backend_ports, redis_url, key, connections))


async def _serve(
    pipe: Connection, wanted: str, backend_ports: Sequence[int], redis_url: str, key: bytes, connections: int
) -> None:
    loop = asyncio.get_running_loop()
    choice = select_engine(wanted)
    engine = Timed(choice.engine)
    steering = Steering(cast("Engine", engine), cast("Admission", Bystander()), loop)
    server = PortServer(cast("RelayEngine", choice.engine), links_max=connections)
    primary, standby = (
        Backend(NodeKey(name, 0), "127.0.0.1", port) for name, port in zip(NODES, backend_ports, strict=True)
    )
    await server.apply([Endpoint(_PORT, 0, Mode.HTTP, primary, standby, connections_max=connections)])
    path = SignalPath(steering, redis_url=redis_url, key=key)
    path.start()
    carrier = "kernel" if server.carried_by_kernel else "relay"
    pipe.send((server.number_of(_PORT), carrier, choice.engine.pins))
    while await asyncio.to_thread(pipe.recv) != "stop":
        flip_us, engine.flip_us = engine.flip_us, []
        pipe.send(flip_us)
    path.stop()
    await server.close()
    choice.engine.close()
