"""The kernel's part of the steered ports of one gateway: the program, its slots, and who is woken."""

from __future__ import annotations

import asyncio
import select

from kernel_steer.engine.kernel.events import Events
from kernel_steer.ports.end import End
from kernel_steer.ports.link import Link, LinkUnavailable
from kernel_steer.ports.program import PortsProgram

LINKS_MAX = 16384


class KernelPorts:
    """Raises OSError or CannotCompile where the kernel does not take the program."""

    def __init__(self, node_map: int, *, links_max: int = LINKS_MAX) -> None:
        """`node_map`: the engine's map of flips."""
        self.program = PortsProgram(node_map, links_max=links_max)
        self._free = list(reversed(range(links_max)))
        self._links: dict[int, Link] = {}  # by slot; made when the slot is used for the first time
        self._events = Events(self.program.maps["port_events"], self.program.events_bytes)
        self._epoll = select.epoll()
        self._epoll.register(self._events.fd, select.EPOLLIN)
        self._by_slot: dict[int, Link] = {}
        self._by_fd: dict[int, tuple[Link, End]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open_link(self, client: End, *, http: bool, idle_ms: int) -> Link:
        """Raises LinkUnavailable."""
        if not self._free:
            raise LinkUnavailable("every slot is in use")
        slot = self._free.pop()
        link = self._links.get(slot) or self._links.setdefault(slot, Link(self, slot))
        try:
            link.open(client, http=http, idle_ms=idle_ms)
        except BaseException:
            self._free.append(slot)
            raise
        self._by_slot[slot] = link
        return link

    def free(self, link: Link) -> None:
        del self._by_slot[link.slot]
        self._free.append(link.slot)

    def watch(self, link: Link, end: End) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._epoll.fileno(), self._on_ready)
        # Not for EPOLLIN, which the kernel raises for every segment, also for those it redirects.
        self._epoll.register(end.sock.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)
        self._by_fd[end.sock.fileno()] = link, end

    def unwatch(self, end: End) -> None:
        if self._by_fd.pop(end.sock.fileno(), None):
            self._epoll.unregister(end.sock.fileno())

    def _on_ready(self) -> None:
        for fd, events in self._epoll.poll(0):
            if fd == self._events.fd:
                for slot in self._events.take():
                    if link := self._by_slot.get(slot):
                        link.wake()
            elif found := self._by_fd.get(fd):
                link, end = found
                if end.backend is not None or events & (select.EPOLLERR | select.EPOLLHUP):
                    link.mark_dead(end)
                link.wake()

    def close(self) -> None:
        """When every link is free again."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._events.close()
        for link in self._links.values():
            link.release()
        self.program.close()
