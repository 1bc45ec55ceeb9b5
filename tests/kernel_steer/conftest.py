"""Fixtures for what needs a metadata service, and for what needs the kernel engine."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from apex.local.metadata_service import MetadataService
from kernel_steer.engine.base import Engine
from kernel_steer.listener.base import Listener, Notice, Source
from tests.kernel_steer.metadata import Machine
from tests.kernel_steer.stand import Stand


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The kernel engine; tests that are about engines in general have a fixture of this name of their own."""
    from kernel_steer.engine.kernel import KernelEngine  # not at the top: only Linux has it

    engine = KernelEngine(flows_max=8)
    yield engine
    engine.close()


@pytest.fixture
async def stand(engine: Any, tmp_path: Path) -> AsyncIterator[Callable[..., Stand]]:
    """Makes flows with their clients and nodes, as many as are asked for."""
    stands: list[Stand] = []

    def make(**options: Any) -> Stand:
        stands.append(Stand(engine, tmp_path / str(len(stands)), **options))
        return stands[-1]

    yield make
    for one in stands:
        one.close()


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    async def start() -> web.AppRunner:
        runner = web.AppRunner(MetadataService().application(), handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def machine(service: str, request: pytest.FixtureRequest) -> Machine:
    return Machine(service, f"i-{abs(hash(request.node.name)):x}")


@pytest.fixture
def listen() -> Iterator[Callable[..., queue.Queue[Notice]]]:
    """Starts a Listener that polls fast, and gives the queue its notices arrive in."""
    running: list[Listener] = []

    def start(source: Source, **options: Any) -> queue.Queue[Notice]:
        notices: queue.Queue[Notice] = queue.Queue()
        running.append(Listener(source, notices.put, interval_s=0.02, **options))
        running[-1].start()
        return notices

    yield start
    for listener in running:
        listener.stop.set()
        listener.join()
