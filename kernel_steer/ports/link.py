"""A link: the way of one steered connection through the kernel, as user space sees and drives it."""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.kernel import bpf, pins, tcp
from kernel_steer.ports.end import End
from kernel_steer.ports.http_framing import Framer, Phase
from kernel_steer.ports.layout import (
    BACKENDS,
    CLIENT,
    HEAD_MAX,
    LINK_BYTES,
    SIDE_AT,
    SIDE_WORDS,
    UNCONFIRMED_MAX,
    SideWord,
    Word,
)

if TYPE_CHECKING:
    import socket

    from kernel_steer.ports.kernel import KernelPorts

_U64 = struct.Struct("=Q")
# So that TCP always takes at once what is redirected: SEGMENTS_MAX of some 2.3 KB, twice, and the bytes.
_QUEUED_MAX = 2 << 20
_UNSENT_MAX = UNCONFIRMED_MAX + 65536
_SETTLE_S = 10.0
_SETTLE_FIRST_S, _SETTLE_LAST_S = 0.0002, 0.02


class LinkUnavailable(Exception):
    """This connection cannot be carried by the kernel; the message says why."""


class Link:
    """One slot of the maps. The words are memory that the kernel reads and writes at the same time."""

    def __init__(self, kernel: KernelPorts, slot: int) -> None:
        self.slot = slot
        self._kernel = kernel
        with memoryview(kernel.program.links) as links, memoryview(kernel.program.replays) as replays:
            self._words = links[slot * LINK_BYTES :][:LINK_BYTES].cast("Q")
            self._replays = replays[slot * HEAD_MAX :][:HEAD_MAX]
        self.ends: dict[int, End] = {}
        self._sleeper: asyncio.Future[None] | None = None
        self._poked = False

    # --- who is there ------------------------------------------------------------------------------------

    def open(self, client: End, *, http: bool, idle_ms: int) -> None:
        """Raises LinkUnavailable; then nothing has changed."""
        for word in range(len(self._words)):
            self._words[word] = 0
        self._words[Word.HTTP] = http
        self._words[Word.IDLE_NS] = idle_ms * 1_000_000
        self._announce(client.sock, CLIENT)
        self.add(client, CLIENT)

    def announce(self, sock: socket.socket, side: int) -> None:
        """Before a node's socket is connected: so the kernel hears of all that happens to it."""
        with suppress(OSError):
            self._announce(sock, side)

    def _announce(self, sock: socket.socket, side: int) -> None:
        bpf.update(self._kernel.program.maps["port_ends"], tcp.cookie(sock), _U64.pack(self.slot << 2 | side))

    def withdraw(self, sock: socket.socket) -> None:
        """Takes `announce` back."""
        bpf.delete(self._kernel.program.maps["port_ends"], tcp.cookie(sock))

    def add(self, end: End, side: int) -> None:
        """From here on the kernel counts this end's bytes. Its side must be empty. Raises LinkUnavailable."""
        sock = end.sock
        if not tcp.is_plain_tcp(sock):
            raise LinkUnavailable("it is not plain TCP")
        cookie, at = tcp.cookie(sock), SIDE_AT + side * SIDE_WORDS
        for word in range(SIDE_WORDS):
            self._words[at + word] = 0
        try:
            tcp.limit_send_buffer(sock, queued_max=_QUEUED_MAX, unsent_max=_UNSENT_MAX)
            now = tcp.progress(sock)
            end.accepted_base, end.settled = now.accepted - end.written, 0
            if end.backend is not None:
                node = end.backend.node
                self._set(side, SideWord.NODE, int.from_bytes(pins.node_key(node.name), "little"))
                self._set(side, SideWord.EPOCH, node.epoch)
            self._set(side, SideWord.BASE, now.accepted - now.unacked - end.written)
            self._set(side, SideWord.WRITTEN, end.written)
            end.read_count = 0
            maps = self._kernel.program.maps
            bpf.update(maps["port_ends"], cookie, _U64.pack(self.slot << 2 | side))
            bpf.update(maps["port_socks"], cookie, _U64.pack(sock.fileno()), bpf.Update.NOEXIST)
        except OSError as error:
            with suppress(OSError):
                self.withdraw(sock)
            raise LinkUnavailable(f"the kernel does not take the socket: {error.strerror}") from error
        end.link, end.side = self, side
        self.ends[side] = end
        self._kernel.watch(self, end)
        end.kick()
        # Last: from here on it is a target.
        self._set(side, SideWord.COOKIE, int.from_bytes(cookie, "little"))

    def remove(self, end: End) -> None:
        """The socket is to be closed next. Nothing is sent there any more once this returns."""
        self._set(end.side, SideWord.COOKIE, 0)
        for other in self.ends.values():
            with suppress(OSError):
                tcp.wait_for_its_lock(other.sock)  # a verdict of its may just be sending there
        self._kernel.unwatch(end)
        with suppress(OSError):
            self.withdraw(end.sock)
        del self.ends[end.side]
        end.link = None

    def close(self) -> None:
        """When no end is left."""
        assert not self.ends
        self._kernel.free(self)

    def release(self) -> None:
        self._words.release()
        self._replays.release()

    # --- words -------------------------------------------------------------------------------------------

    def _get(self, side: int, word: SideWord) -> int:
        return self._words[SIDE_AT + side * SIDE_WORDS + word]

    def _set(self, side: int, word: SideWord, value: int) -> None:
        self._words[SIDE_AT + side * SIDE_WORDS + word] = value

    def has_unread(self, end: End) -> bool:
        """Bytes were passed that nobody has read."""
        return self._get(end.side, SideWord.PASSED) != end.read_count

    def has_ended(self, end: End) -> bool:
        """The peer has closed, its half at least."""
        return bool(self._get(end.side, SideWord.FIN) or self._get(end.side, SideWord.DEAD))

    def has_overlapped(self, end: End) -> bool:
        """A retransmission brought bytes a second time: what came since cannot be trusted."""
        return self._get(end.side, SideWord.OVERLAPS) != 0

    def mark_dead(self, end: End) -> None:
        self._set(end.side, SideWord.DEAD, 1)

    def redirected(self, end: End) -> int:
        """Bytes that the kernel sent on to this end."""
        return self._get(end.side, SideWord.REDIRECTED)

    @property
    def pinned(self) -> int:
        return self._words[Word.PINNED]

    @property
    def moved(self) -> int:
        """How often the kernel went on at another node."""
        return self._words[Word.MOVED]

    @property
    def last_ns(self) -> int:
        """On the clock of time.monotonic_ns()."""
        return self._words[Word.LAST_NS]

    @property
    def at_boundary(self) -> bool:
        """Between two requests. Exact while the route is closed."""
        words = self._words
        return words[Word.REQUESTS] == words[Word.RESPONSES] and words[Word.REQUEST_PHASE] == Phase.BOUNDARY

    @property
    def response_is_over(self) -> bool:
        return self._words[Word.REQUESTS] == self._words[Word.RESPONSES]

    @property
    def request(self) -> Framer:
        return Framer(Phase(self._words[Word.REQUEST_PHASE]), self._words[Word.REQUEST_LEFT])

    @property
    def response(self) -> Framer | None:
        """None before its first byte."""
        if self.response_is_over:
            return Framer()
        phase = Phase(self._words[Word.RESPONSE_PHASE])
        return None if phase is Phase.BOUNDARY else Framer(phase, self._words[Word.RESPONSE_LEFT])

    @property
    def asked_head(self) -> bool:
        return bool(self._words[Word.ASKED_HEAD])

    @property
    def replay(self) -> bytes | None:
        """The request under way, when it may be sent again."""
        length = self._words[Word.REPLAY]
        return bytes(self._replays[:length]) if length else None

    # --- the route ---------------------------------------------------------------------------------------

    def set_boundary(self, *, pinned: int, first: int, phase: Phase = Phase.BOUNDARY) -> None:
        """Where user space leaves the connection: between two requests, or in a tunnel."""
        words = self._words
        words[Word.RESPONSES] = words[Word.REQUESTS]
        words[Word.REQUEST_PHASE] = words[Word.RESPONSE_PHASE] = phase
        words[Word.REQUEST_LEFT] = words[Word.RESPONSE_LEFT] = words[Word.REPLAY] = 0
        words[Word.PINNED] = pinned
        self.set_first(first)

    def set_first(self, side: int) -> None:
        """The side of the primary."""
        self._words[Word.FIRST] = side

    def set_last_ns(self, value: int) -> None:
        self._words[Word.LAST_NS] = max(value, self._words[Word.LAST_NS])

    def start(self, *, attention: bool) -> None:
        """Opens the route. All that was read has been written on; the kernel heeds what was passed meanwhile."""
        for side, end in self.ends.items():
            self._set(side, SideWord.ACKED, end.read_count)
            self._set(side, SideWord.WRITTEN, end.written)
            if self._kernel.program.unwatched:
                self._confirm(side, end)
        self._words[Word.ATTENTION] = attention
        self._words[Word.KERNEL] = 1

    def _confirm(self, side: int, end: End) -> None:
        with suppress(OSError):
            now = tcp.progress(end.sock)
            base = self._get(side, SideWord.BASE)
            self._set(side, SideWord.CONFIRMED, max(0, now.accepted - now.unacked - base))
            if not now.unacked:
                self._set(side, SideWord.CONFIRMED_SEGMENTS, self._get(side, SideWord.SEGMENTS))

    def stop(self) -> None:
        """Closes the route: after this every byte is passed, and the words stand still."""
        self._words[Word.KERNEL] = 0
        self._words[Word.ARMED] = 0
        self._wait_for_verdicts()

    @property
    def is_open(self) -> bool:
        return bool(self._words[Word.KERNEL])

    def keeps_up(self) -> bool:
        """All ends take what they are sent: the kernel has room for more."""
        with suppress(OSError):
            return all(tcp.unacked(end.sock) <= UNCONFIRMED_MAX // 2 for end in self.ends.values())
        return False

    def _wait_for_verdicts(self) -> None:
        for end in self.ends.values():
            with suppress(OSError):
                tcp.wait_for_its_lock(end.sock)

    async def sleep(self) -> None:
        """Until something needs user space. What it is, the words say."""
        sleeper = self._sleeper = asyncio.get_running_loop().create_future()
        try:
            self._words[Word.ARMED] = 1
            # A verdict that began before we asked has ended after this; a later one sees that we asked.
            self._wait_for_verdicts()
            if self._poked or any(map(self._is_unheard, self.ends.values())):
                return
            await sleeper
        finally:
            self._sleeper = None
            self._poked = False

    def _is_unheard(self, end: End) -> bool:
        return self.has_unread(end) or self.has_overlapped(end) or (self.has_ended(end) and not end.ended)

    def wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def poke(self) -> None:
        """User space itself has something to do."""
        self._poked = True
        self.wake()

    async def settle(self, end: End) -> None:
        """Before user space writes to an end: waits until TCP has all that was redirected there.

        Raises OSError when it is dead, TimeoutError when the kernel does not deliver.
        """
        redirected = self.redirected(end)
        if end.settled == redirected:
            return
        deadline, pause = time.monotonic() + _SETTLE_S, _SETTLE_FIRST_S
        while True:
            now = tcp.progress(end.sock)
            if now.accepted - end.accepted_base >= end.written + redirected:
                end.settled = redirected
                return
            if not now.alive:
                raise ConnectionResetError("closed with bytes on the way")
            if time.monotonic() > deadline:
                raise TimeoutError("the kernel does not deliver what it took")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SETTLE_LAST_S)


def side_of_other(side: int) -> int:
    return BACKENDS[0] + BACKENDS[1] - side


def is_flipped(node_map: int, node: NodeKey) -> bool:
    return pins.first_live_epoch(node_map, node.name) > node.epoch
