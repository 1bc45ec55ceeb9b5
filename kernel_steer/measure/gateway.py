"""The real gateway with a business in memory: two nodes, one key, one model."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from kernel_steer.admission import (
    Answer,
    Caller,
    FlipReport,
    ModelCard,
    Node,
    OnceKey,
    Refusal,
    Ticket,
)
from kernel_steer.engine import select_engine
from kernel_steer.engine.base import Engine, NodeKey
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.moves import Moves
from kernel_steer.gateway.server import Connections, listen
from kernel_steer.gateway.signal_path import SignalPath
from kernel_steer.gateway.steering import Steering
from kernel_steer.journal import Journal
from kernel_steer.measure.node import MODEL
from kernel_steer.ports import Endpoint
from kernel_steer.resume.tokens import TokenizerStore
from kernel_steer.resume.work import Services

NODES = ("a", "b")
_CONTEXT_TOKENS = 1 << 20


class Business:
    """Sends everything to one of two nodes; a node that is flipped away is back at once in a new incarnation."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = dict(zip(NODES, ports, strict=True))
        self._epochs = dict.fromkeys(NODES, 0)
        self._current = NODES[0]

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def authenticate(self, authorization: str | None) -> Caller:
        return Caller("bench", "bench")

    async def list_models(self, caller: Caller) -> Sequence[ModelCard]:
        return [ModelCard(MODEL, _CONTEXT_TOKENS, 0, "bench")]

    async def admit(self, caller: Caller, *, request_id: str, **_: Any) -> Ticket:
        return Ticket(request_id, ModelCard(MODEL, _CONTEXT_TOKENS, 0, "bench"), _CONTEXT_TOKENS)

    async def begin_once(self, once: OnceKey, request_id: str) -> bytes | None:
        raise Refusal(400, "not_here", "The bench has no store for Idempotency-Keys.")

    async def keep_once(self, request_id: str, answer: bytes | None) -> None: ...

    async def forget_once(self, request_id: str) -> None: ...

    def choose_node(
        self, model: str, *, exclude: frozenset[str] = frozenset(), prefix: bytes = b""
    ) -> Node | None:
        name = self._current
        return Node(name, self._epochs[name], "127.0.0.1", self._ports[name])

    def node_released(self, name: str, epoch: int) -> None: ...

    def knows_node(self, name: str) -> bool:
        return name in self._ports

    def node_draining(self, name: str, epoch: int) -> None:
        if epoch == self._epochs[name]:
            self._epochs[name] += 1
            self._current = next(other for other in NODES if other != name)

    def node_restored(self, name: str, epoch: int) -> None: ...

    def node_failed(self, name: str, epoch: int, reason: str) -> None: ...

    def node_misconfigured(self, name: str, epoch: int, reason: str) -> None: ...

    def endpoints(self) -> Sequence[Endpoint]:
        return ()

    async def settle(self, answer: Answer) -> None: ...

    async def abandon(self, request_id: str, record: dict[str, Any]) -> None: ...

    async def report_flip(self, report: FlipReport) -> None: ...


class _Timed:
    """An engine whose flips are timed."""

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


def run_gateway(
    pipe: Connection, engine: str, ports: Sequence[int], redis_url: str, key: bytes, slots: int
) -> None:
    """Target of a process. Sends its port; on any order sends the flip times so far."""
    uvloop.run(_serve(pipe, engine, ports, redis_url, key, slots))


async def _serve(
    pipe: Connection, wanted: str, ports: Sequence[int], redis_url: str, key: bytes, slots: int
) -> None:
    loop = asyncio.get_running_loop()
    choice = select_engine(wanted)
    engine: Any = _Timed(choice.engine)
    business = Business(ports)
    moves = Moves()
    steering = Steering(engine, business, loop, moves)
    with tempfile.TemporaryDirectory(prefix="apex-steer-bench-") as folder:
        services = Services(business, engine, TokenizerStore(Path(folder)), on_first_byte=steering.first_byte)
        gateway = Gateway(services, Journal(Path(folder) / "journal", slots), choice, moves, steering.stats)
        listener = listen("127.0.0.1", 0)
        path = SignalPath(steering, redis_url=redis_url, key=key)
        path.start()
        accepting = loop.create_task(Connections(gateway, listener).accept())
        pipe.send((listener.getsockname()[1], choice.engine.name))
        while await asyncio.to_thread(pipe.recv) != "stop":
            pipe.send(engine.flip_us)
        accepting.cancel()
        path.stop()
        engine.close()


def fresh_key() -> bytes:
    return secrets.token_bytes(32)
