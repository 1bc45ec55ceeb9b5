"""The steered ports of one gateway: listen on them, and follow what they are configured to be."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kernel_steer.engine.base import Engine, NodeKey
from kernel_steer.ports.connection import Connection, prepare
from kernel_steer.ports.endpoint import Endpoint, Mode, PortStats, Timeouts
from kernel_steer.ports.http import HttpConnection
from kernel_steer.ports.tunnel import TcpConnection

if TYPE_CHECKING:
    from kernel_steer.ports.kernel import KernelPorts

log = logging.getLogger(__name__)
_BACKLOG = 1024
_KINDS: dict[Mode, type[Connection]] = {Mode.HTTP: HttpConnection, Mode.TCP: TcpConnection}


class PortServer:
    """See the package's docstring."""

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        timeouts: Timeouts | None = None,
        links_max: int | None = None,
    ) -> None:
        """`engine`: what select_engine gave. Its flips are those of the ports."""
        # Why the kernel does not carry, when it does not.
        self.reason = "the engine is relay" if engine.name == "relay" else "no port was opened yet"
        self._host = host
        self._engine = engine
        self._timeouts = timeouts or Timeouts()
        self._links_max = links_max
        self._kernel: KernelPorts | None = None
        self._loaded = False
        self._ports: dict[str, Port] = {}
        self._past = PortStats()  # of ports that are closed
        self._failed: dict[str, str] = {}  # why a port is not open
        self._lock = asyncio.Lock()

    async def apply(self, endpoints: Iterable[Endpoint]) -> None:
        """Makes these the ports that are open. Idempotent. A port that cannot be opened is said in the log,
        and tried again at the next call."""
        async with self._lock:
            wanted = {endpoint.name: endpoint for endpoint in endpoints}
            if wanted and not self._loaded:
                await self._load()
            for name in self._failed.keys() - wanted.keys():
                del self._failed[name]
            for name in self._ports.keys() - wanted.keys():
                await self._close(name)
            for name, endpoint in wanted.items():
                port = self._ports.get(name)
                if port is not None and not port.can_become(endpoint):
                    await self._close(name)
                    port = None
                if port is not None:
                    port.retarget(endpoint)
                else:
                    self._open(endpoint)

    async def follow(self, wanted: Callable[[], Iterable[Endpoint]], every_s: float = 0.25) -> None:
        """Does so again and again, until it is cancelled."""
        while True:
            try:
                await self.apply(wanted())
            except Exception:
                log.exception("the steered ports could not be brought up to date")
            await asyncio.sleep(every_s)

    def number_of(self, name: str) -> int:
        """The TCP port that is open under this name. Raises KeyError."""
        return self._ports[name].number

    @property
    def names(self) -> frozenset[str]:
        """Of the ports that are open."""
        return frozenset(self._ports)

    @property
    def carried_by_kernel(self) -> bool:
        return self._kernel is not None

    @property
    def stats(self) -> PortStats:
        """Sums over all ports."""
        total = replace(self._past)
        for port in self._ports.values():
            _add(total, port.count())
        return total

    def health(self) -> dict[str, int | str]:
        """For the gateway's /healthz."""
        stats = self.stats
        return {
            "ports_open": len(self._ports),
            "ports_engine": "kernel" if self.carried_by_kernel else "relay",
            "ports_engine_detail": self.reason,
            "ports_failed": len(self._failed),
            "port_connections_open": stats.open,
            "port_connections": stats.accepted,
            "port_connections_refused": stats.refused,
            "port_moves": stats.moved,
            "port_requests_sent_again": stats.sent_again,
            "port_requests_unserved": stats.unserved,
            "port_responses_cut": stats.cut,
            "port_handovers": stats.to_user_space,
        }

    async def close(self) -> None:
        """Cuts what is still open."""
        async with self._lock:
            for name in list(self._ports):
                await self._close(name)
            if self._kernel is not None:
                self._kernel.close()
                self._kernel = None

    async def drain(self, timeout_s: float) -> None:
        """Takes no new connections and waits until those that are open have ended: of mode http at the next
        boundary, of mode tcp when their client or node ends them."""
        for port in self._ports.values():
            port.leave()
        open_now = [task for port in self._ports.values() for task in port.tasks]
        if open_now:
            await asyncio.wait(open_now, timeout=timeout_s)

    async def _load(self) -> None:
        self._loaded = True
        node_map = self._engine.node_map
        if node_map is None:
            return
        from kernel_steer.engine.kernel.compile import CannotCompile
        from kernel_steer.ports.kernel import KernelPorts

        options = {} if self._links_max is None else {"links_max": self._links_max}
        try:
            self._kernel = await asyncio.to_thread(KernelPorts, node_map, **options)
        except (OSError, CannotCompile) as error:
            self.reason = str(error)
            log.warning("steered ports are relayed: %s", error)
        else:
            self.reason = self._kernel.program.unwatched
            log.info("steered ports are carried by the kernel%s", f"; {self.reason}" if self.reason else "")

    def _open(self, endpoint: Endpoint) -> None:
        try:
            self._ports[endpoint.name] = Port(
                endpoint, self._host, self._kernel, self._engine.is_flipped, self._timeouts
            )
        except OSError as error:
            why = error.strerror or str(error)
            if self._failed.get(endpoint.name) != why:
                log.error("steered port %s (%d) is not open: %s", endpoint.name, endpoint.port, why)
            self._failed[endpoint.name] = why
        else:
            self._failed.pop(endpoint.name, None)
            log.info("steered port %s is open at %d", endpoint.name, self._ports[endpoint.name].number)

    async def _close(self, name: str) -> None:
        port = self._ports.pop(name)
        await port.close()
        _add(self._past, port.count())


class Port:
    """One listening port and its connections."""

    def __init__(
        self,
        endpoint: Endpoint,
        host: str,
        kernel: KernelPorts | None,
        is_flipped: Callable[[NodeKey], bool],
        timeouts: Timeouts,
    ) -> None:
        """Raises OSError."""
        self._endpoint = endpoint
        self._kernel = kernel
        self._is_flipped = is_flipped
        self._timeouts = timeouts
        self._stats = PortStats()
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._listener = _listen(host, endpoint.port)
        self.number = int(self._listener.getsockname()[1])
        if kernel is not None:
            kernel.program.watch_port(self.number)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._connections)

    def count(self) -> PortStats:
        """Counts up to now."""
        for connection in self._connections.values():
            connection.count_moves()
        return replace(self._stats, open=len(self._connections))

    def can_become(self, endpoint: Endpoint) -> bool:
        """Without closing the port."""
        same = ("port", "mode", "idle_ms")
        return all(getattr(endpoint, name) == getattr(self._endpoint, name) for name in same)

    def retarget(self, endpoint: Endpoint) -> None:
        """Other nodes, or another limit."""
        if endpoint == self._endpoint:
            return
        self._endpoint = endpoint
        for connection in self._connections.values():
            connection.retarget(endpoint)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors: others will be closed soon
                log.warning("cannot accept: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= self._endpoint.connections_max:
                self._stats.refused += 1
                sock.close()
                continue
            prepare(sock)
            self._stats.accepted += 1
            connection = _KINDS[self._endpoint.mode](
                sock,
                self._endpoint,
                kernel=self._kernel,
                is_flipped=self._is_flipped,
                stats=self._stats,
                timeouts=self._timeouts,
            )
            task = loop.create_task(connection.run())
            self._connections[task] = connection
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        if not task.cancelled() and (error := task.exception()):
            log.error("a steered connection failed", exc_info=error)

    def stop_listening(self) -> None:
        self._accepting.cancel()
        self._listener.close()
        if self._kernel is not None:
            self._kernel.program.unwatch_port(self.number)

    def leave(self) -> None:
        """No new connections; those that are open end at their next boundary."""
        self.stop_listening()
        for task, connection in self._connections.items():
            if connection.leave():
                task.cancel()

    async def close(self) -> None:
        """Cuts what is still open."""
        self.stop_listening()
        tasks = self.tasks
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _listen(host: str, number: int) -> socket.socket:
    """Plain TCP by name: MPTCP sockets cannot be steered. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, number))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _add(total: PortStats, part: PortStats) -> None:
    for name in PortStats.__slots__:
        setattr(total, name, getattr(total, name) + getattr(part, name))
