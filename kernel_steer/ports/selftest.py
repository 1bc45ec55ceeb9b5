"""Can this kernel carry steered ports? Asked apart from the engine: where it cannot, only they are relayed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kernel_steer.engine import EngineUnavailable, select_engine
from kernel_steer.engine.base import Engine, NodeKey
from kernel_steer.engine.kernel.selftest import Check
from kernel_steer.ports.endpoint import Backend, Endpoint, Mode
from kernel_steer.ports.server import PortServer

_PATIENCE_S = 10.0
_REQUEST = b"GET / HTTP/1.1\r\nHost: selftest\r\n\r\n"
_PRIMARY, _STANDBY = NodeKey("selftest-a", 0), NodeKey("selftest-b", 0)


def run() -> list[Check]:
    """To be called where the engine's own checks are ok, and no event loop runs. Never raises."""
    try:
        engine = select_engine("kernel").engine
    except EngineUnavailable as error:
        return [Check("ports_load", ok=False, detail=str(error))]
    try:
        return asyncio.run(_try(engine))
    finally:
        engine.close()


async def _try(engine: Engine) -> list[Check]:
    server = PortServer(engine, links_max=8)
    try:
        async with _node(b"a") as first, _node(b"b") as second:
            primary = Backend(_PRIMARY, "127.0.0.1", first)
            standby = Backend(_STANDBY, "127.0.0.1", second)
            await server.apply([Endpoint("selftest", 0, Mode.HTTP, primary, standby)])
            if not server.carried_by_kernel:
                return [Check("ports_load", ok=False, detail=server.reason)]
            checks = [
                Check("ports_load", ok=True, detail="the verifier takes the program of the ports"),
                Check(
                    "ports_node_death",
                    ok=not server.reason,
                    detail=server.reason or "the kernel tells when a port's node dies",
                ),
            ]
            async with asyncio.timeout(_PATIENCE_S):
                return [*checks, await _requests(engine, server)]
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        return [Check("ports_requests", ok=False, detail=f"a request was not answered: {error!r}")]
    finally:
        await server.close()


async def _requests(engine: Engine, server: PortServer) -> Check:
    number = server.number_of("selftest")
    reader, writer = await asyncio.open_connection("127.0.0.1", number)

    async def ask() -> bytes:
        writer.write(_REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return await reader.readexactly(1)

    with contextlib.closing(writer):
        said = [await ask() for _ in range(3)]
        engine.flip(_PRIMARY)
        while (name := await ask()) != b"b":
            pass  # the standby is connected a moment after the client
        said.append(name)
        engine.restore(_PRIMARY)
        said.append(await ask())
    if said != [b"a", b"a", b"a", b"b", b"a"]:
        return Check("ports_requests", ok=False, detail=f"nodes answered in the order {said}")
    return Check("ports_requests", ok=True, detail="requests go to the standby by a flip, and back")


@contextlib.asynccontextmanager
async def _node(name: bytes) -> AsyncIterator[int]:
    """A node that answers every request with its name."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n" + name)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
