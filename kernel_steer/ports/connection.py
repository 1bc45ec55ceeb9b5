"""What every steered connection has: a client, up to two connected nodes, and a way to replace them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kernel_steer.engine.base import NodeKey
from kernel_steer.ports.end import End, Lost
from kernel_steer.ports.endpoint import Backend, Endpoint, Mode, PortStats, Timeouts
from kernel_steer.ports.layout import BACKENDS

if TYPE_CHECKING:
    from kernel_steer.ports.kernel import KernelPorts
    from kernel_steer.ports.link import Link

log = logging.getLogger(__name__)
_MEND_LONGEST = 20


class Connection:
    """Ends when `run` does. `http.py` and `tunnel.py` say what happens in between."""

    mode: Mode
    engaged = True  # with the node that is pinned; False between two requests

    def __init__(
        self,
        client: socket.socket,
        endpoint: Endpoint,
        *,
        kernel: KernelPorts | None,
        is_flipped: Callable[[NodeKey], bool],
        stats: PortStats,
        timeouts: Timeouts,
    ) -> None:
        self.client = End(client, stall_s=timeouts.stall_s)
        self.stats = stats
        self.timeouts = timeouts
        self.backends: dict[int, End] = {}  # by side
        self.pinned = 0  # the side that serves, or served last
        self.link: Link | None = None
        self._kernel = kernel
        self.endpoint = endpoint
        self._flipped = is_flipped
        self._menders: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # a node has come, or cannot be reached
        self._unreachable: set[Backend] = set()
        self._pauses: dict[int, asyncio.Future[None]] = {}  # of menders, by side
        self._served_by: NodeKey | None = None
        self._moved_in_kernel = 0
        self.leaving = False  # it is to end at the next boundary

    # --- its life ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carries the connection until it ends. Raises nothing but what a programming error raises."""
        try:
            self._enter_kernel()
            self._fill()
            await self.serve()
        except Lost as why:
            log.debug("a steered connection is over: %s", why)
            for end in (self.client, *self.backends.values()):
                end.abort()
        finally:
            await self._close()

    async def serve(self) -> None:
        raise NotImplementedError

    def _enter_kernel(self) -> None:
        if self._kernel is None:
            return
        from kernel_steer.ports.link import LinkUnavailable

        try:
            self.link = self._kernel.open_link(
                self.client, http=self.mode is Mode.HTTP, idle_ms=self.endpoint.idle_ms
            )
        except LinkUnavailable as reason:
            log.info("a steered connection stays in user space: %s", reason)

    async def _close(self) -> None:
        for mender in list(self._menders.values()):
            mender.cancel()
        if self._menders:
            await asyncio.wait(list(self._menders.values()))
        if self.link is not None:
            self.take_over()
            with suppress(OSError, TimeoutError):
                # What the kernel has taken is thrown away when the socket is closed too early.
                await self.link.settle(self.client)
        for end in (*self.backends.values(), self.client):
            end.close()
        self.backends.clear()
        if self.link is not None:
            self.link.close()

    def leave(self) -> bool:
        """Ends it at the next boundary. True when it is at one, in user space: then it can be cancelled."""
        self.leaving = True
        if self.link is not None and self.link.is_open:
            self.link.poke()
            return False
        return not self.engaged

    # --- nodes -------------------------------------------------------------------------------------------

    def retarget(self, endpoint: Endpoint) -> None:
        """There are other nodes now. One that serves is kept until its response is complete."""
        self.endpoint = endpoint
        if self.link is not None and self.link.is_open:
            self.link.poke()  # the kernel may just be choosing the node that would be let go of
        else:
            self.housekeep()

    def housekeep(self) -> None:
        """Lets go of nodes that are dead or not wanted any more, and looks for others."""
        for side, end in list(self.backends.items()):
            if side == self.pinned and self.engaged:
                continue
            if self.is_unwanted(end) or not self.is_fit(end):
                self.drop(side)
        self._fill()

    def is_fit(self, end: End) -> bool:
        """A node's connection that nothing is under way on can be used for what comes next."""
        return end.is_quiet()

    def is_flipped(self, end: End) -> bool:
        """Its node gets nothing new."""
        return end.backend is not None and self._flipped(end.backend.node)

    def is_unwanted(self, end: End) -> bool:
        """It is only kept for what is under way."""
        return end.backend not in self.endpoint.backends

    def drop(self, side: int) -> None:
        """Closes a node's connection."""
        end = self.backends.pop(side, None)
        if end is not None:
            end.close()

    def _fill(self) -> None:
        """Connects to the nodes that are wanted and missing."""
        present = {end.backend for end in self.backends.values()}
        missing = [backend for backend in self.endpoint.backends if backend not in present]
        for side in BACKENDS:
            if side not in self.backends and side not in self._menders and missing:
                mender = asyncio.get_running_loop().create_task(self._mend(side, missing.pop(0)))
                self._menders[side] = mender
        self._set_first()

    def _set_first(self) -> None:
        if self.link is not None:
            self.link.set_first(self._order()[0])

    def _order(self) -> tuple[int, int]:
        """Sides in order of preference."""
        primary = self.endpoint.primary
        second = self.backends.get(BACKENDS[1])
        if second is not None and second.backend == primary:
            return BACKENDS[1], BACKENDS[0]
        return BACKENDS

    async def _mend(self, side: int, backend: Backend) -> None:
        """Keeps trying until the node is connected or not wanted any more."""
        pause_s = self.timeouts.mend_s
        try:
            while backend in self.endpoint.backends:
                if not self._flipped(backend.node) and await self._connect(side, backend):
                    self._unreachable.discard(backend)
                    break
                self._unreachable.add(backend)
                self._changed.set()
                self._pauses[side] = asyncio.get_running_loop().create_future()
                await asyncio.wait([self._pauses[side]], timeout=pause_s)
                pause_s = min(2 * pause_s, _MEND_LONGEST * self.timeouts.mend_s)
        finally:
            self._pauses.pop(side, None)
            del self._menders[side]
            self._changed.set()
        self._fill()  # others may be wanted by now

    async def _connect(self, side: int, backend: Backend) -> bool:
        try:
            sock = await self._dial(side, backend)
        except (OSError, TimeoutError) as error:
            log.info("node %s cannot be reached: %s", backend.node.name, error)
            return False
        end = End(sock, backend, stall_s=self.timeouts.stall_s)
        if self.link is not None and not self._add_to_link(end, side):
            sock.close()
            return False
        self.backends[side] = end
        self._set_first()
        return True

    async def _dial(self, side: int, backend: Backend) -> socket.socket:
        family = socket.AF_INET6 if ":" in backend.host else socket.AF_INET
        # Plain TCP by name: MPTCP sockets cannot be steered.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            prepare(sock)
            if self.link is not None:
                self.link.announce(sock, side)
            async with asyncio.timeout(self.timeouts.connect_s):
                await asyncio.get_running_loop().sock_connect(sock, (backend.host, backend.port))
        except BaseException:
            if self.link is not None:
                self.link.withdraw(sock)
            sock.close()
            raise
        return sock

    def _add_to_link(self, end: End, side: int) -> bool:
        from kernel_steer.ports.link import LinkUnavailable

        assert self.link is not None
        try:
            self.link.add(end, side)
        except LinkUnavailable as reason:
            log.info("a node's connection cannot be steered: %s", reason)
            return False
        return True

    def usable(self) -> int:
        """The side for what comes next; 0 when there is none."""
        for side in self._order():
            end = self.backends.get(side)
            if end is not None:
                if not self.is_fit(end):
                    self.drop(side)
                elif not self.is_flipped(end):
                    return side
        return 0

    async def find(self) -> int:
        """`usable`, after waiting for a node to be connected. 0 when none can be."""
        side = self.usable()
        if side and not self._primary_may_come():
            return side
        if not side:
            self._try_now()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeouts.primary_s if side else self.timeouts.connect_s):
                while (not side and self._may_come()) or self._primary_may_come():
                    self._changed.clear()
                    await self._changed.wait()
                    side = self.usable()
        return self.usable()

    def _try_now(self) -> None:
        self._unreachable.clear()
        self._fill()
        for pause in self._pauses.values():
            if not pause.done():
                pause.set_result(None)

    def _primary_may_come(self) -> bool:
        """Both nodes are just being connected, and the one that stands by was faster."""
        primary = self.endpoint.primary
        present = {end.backend for end in self.backends.values()}
        return primary is not None and primary not in present and self._is_awaited(primary)

    def _may_come(self) -> bool:
        return any(map(self._is_awaited, self.endpoint.backends))

    def _is_awaited(self, backend: Backend) -> bool:
        return backend not in self._unreachable and not self._flipped(backend.node)

    # --- which of them serves ----------------------------------------------------------------------------

    def pin(self, side: int) -> None:
        """From here on this one serves."""
        backend = self.backends[side].backend
        assert backend is not None
        if self._served_by not in (None, backend.node):
            self.stats.moved += 1
        self.pinned, self._served_by = side, backend.node

    def take_over(self) -> None:
        """Closes the kernel's route, and learns what the kernel did."""
        assert self.link is not None
        self.link.stop()
        self.count_moves()

    def count_moves(self) -> None:
        """Adds what the kernel did by itself to the counts."""
        if self.link is None:
            return
        by_kernel = self.link.moved - self._moved_in_kernel
        self._moved_in_kernel += by_kernel
        self.stats.moved += by_kernel
        end = self.backends.get(self.link.pinned)
        if end is not None and end.backend is not None:
            if by_kernel:
                self._served_by = end.backend.node
            self.pin(end.side)


def prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
