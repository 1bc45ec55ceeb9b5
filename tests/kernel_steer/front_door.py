"""A whole gateway on a port of its own and in a thread of its own, for clients that block or run elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from kernel_steer.admission import Answer
from kernel_steer.engine import EngineChoice
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.server import Connections, listen
from kernel_steer.resume.work import Limits
from tests.kernel_steer.engine_double import EngineDouble
from tests.kernel_steer.harness import QUICK, AdmissionDouble, Bench

T = TypeVar("T")
_PATIENCE_S = 20.0


class FrontDoor:
    """`doubles` are started and ended with it; nodes that run already are the admission's own business."""

    def __init__(
        self,
        admission: AdmissionDouble,
        folder: Path,
        *,
        doubles: Sequence[EngineDouble] = (),
        engine: EngineChoice | None = None,
        limits: Limits = QUICK,
    ) -> None:
        self.admission = admission
        self._doubles = doubles
        self._engine = engine or EngineChoice(RelayEngine(), "test")
        self._folder = folder
        self._limits = limits
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front-door")
        self._open = AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.port: int = self.run(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._open.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._engine.engine.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """In the gateway's thread."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(_PATIENCE_S)

    def answers(self, count: int) -> list[Answer]:
        """All that was settled, once there are so many."""
        self.run(self._until(lambda: len(self.admission.answers) >= count))
        return list(self.admission.answers)

    @staticmethod
    async def _until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            while not true():
                await asyncio.sleep(0.005)

    async def _start(self) -> int:
        for double in self._doubles:
            await self._open.enter_async_context(double.running())
        bench = Bench(self.admission, self._folder, self._engine.engine, self._limits)
        gateway = Gateway(bench.services, bench.journal, self._engine)
        listener = listen("127.0.0.1", 0)
        connections = Connections(gateway, listener)
        accepting = asyncio.create_task(connections.accept())

        async def close() -> None:
            accepting.cancel()
            listener.close()
            gateway.draining = True
            await connections.drain(2)
            await gateway.settled(2)
            assert bench.journal.in_use == 0, "an answer was never settled"
            bench.close()

        self._open.push_async_callback(close)
        return int(listener.getsockname()[1])
