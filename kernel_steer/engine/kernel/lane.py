"""A lane: the way of one flow through the kernel, as user space sees and drives it."""

from __future__ import annotations

import errno
import socket
import struct

from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.kernel import bpf, pins, tcp
from kernel_steer.engine.kernel.layout import (
    FLOW_BYTES,
    RING_BYTES,
    RING_STRIDE,
    SEGMENTS_MAX,
    WAKE_BYTES,
    WAKE_SEGMENTS,
    Word,
)
from kernel_steer.engine.kernel.program import Program

_U32 = struct.Struct("=I")
# Spliced bytes go to a client only while it owes us the acknowledgement of no more than this: 30 events
# a second and a round trip of 300 ms are 3 KB.
UNACKED_MAX = 16384
# So TCP always takes at once what is redirected: at most RING_BYTES and UNACKED_MAX in segments of some
# 2.3 KB of memory each. What is redirected therefore never waits in the kernel for the client.
_QUEUED_MAX = 1536 * 1024
_UNSENT_MAX = 2 * UNACKED_MAX + 4096
# For the bytes that a node sent and nobody has read. The kernel doubles it, and counts buffers, not bytes.
_WAITING_MAX = 8192
assert _QUEUED_MAX > 2 * SEGMENTS_MAX * 2304 + RING_BYTES + UNACKED_MAX
assert _UNSENT_MAX > RING_BYTES + UNACKED_MAX


class LaneUnavailable(Exception):
    """This flow cannot be spliced; the message says why. It is relayed."""


class Lane:
    """One slot of the maps. The words are memory that the kernel reads and writes at the same time."""

    def __init__(self, program: Program, index: int) -> None:
        self.index = index
        self._program = program
        with memoryview(program.flows) as flows, memoryview(program.rings) as rings:
            self._words = flows[index * FLOW_BYTES :][:FLOW_BYTES].cast("Q")
            self._ring = rings[index * RING_STRIDE :][:RING_BYTES]
        self._generation = 0
        self._cookie = b""

    def open(
        self, client: socket.socket, backend: socket.socket, *, node: NodeKey, already_read: int
    ) -> None:
        """Puts both sockets into the kernel's maps, with splicing off.

        From here on the backend's bytes are counted. Raises LaneUnavailable; then nothing has changed, but
        the client may stay in its map, where nothing happens to it.
        """
        if not (tcp.is_plain_tcp(client) and tcp.is_plain_tcp(backend)):
            raise LaneUnavailable("it is not plain TCP")
        self._cookie = tcp.cookie(backend)
        self._generation += 1
        words = self._words
        for word in Word:
            words[word] = 0
        words[Word.CLIENT] = int.from_bytes(tcp.cookie(client), "little")
        words[Word.ALREADY_READ] = already_read
        words[Word.GENERATION] = self._generation
        words[Word.NODE] = int.from_bytes(pins.node_key(node.name), "little")
        words[Word.EPOCH] = node.epoch
        maps = self._program.maps
        try:
            self._add_client(client)
            # What a node sends while its client does not read waits here, and then in the node.
            backend.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WAITING_MAX)
            # The node's socket last: from that moment on its segments find everything in place.
            bpf.update(maps["conn"], self._cookie, _U32.pack(self.index))
            bpf.update(maps["nodes"], self._cookie, struct.pack("=Q", backend.fileno()), bpf.Update.NOEXIST)
        except OSError as error:
            self.forget()
            self.reset()
            raise LaneUnavailable(f"the kernel does not take the socket: {error.strerror}") from error

    def _add_client(self, client: socket.socket) -> None:
        """A client stays in its map until it closes, over all its answers."""
        key, value = tcp.cookie(client), struct.pack("=Q", client.fileno())
        try:
            bpf.update(self._program.maps["clients"], key, value, bpf.Update.NOEXIST)
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise
        else:
            tcp.limit_send_buffer(client, queued_max=_QUEUED_MAX, unsent_max=_UNSENT_MAX)

    def forget(self) -> None:
        """No segment finds this lane any more. One that has found it already may still be under way."""
        bpf.delete(self._program.maps["conn"], self._cookie)

    def reset(self) -> None:
        """Marks the slot as free, once nothing is under way."""
        self._words[Word.GENERATION] = 0

    def release(self) -> None:
        """Gives up the views."""
        self._words.release()
        self._ring.release()

    @property
    def generation(self) -> int:
        return self._generation

    # --- what the kernel did ---------------------------------------------------------------------------

    @property
    def passed(self) -> int:
        return self._words[Word.PASSED]

    @property
    def redirected(self) -> int:
        return self._words[Word.REDIRECTED]

    @property
    def segments(self) -> int:
        return self._words[Word.SEGMENTS]

    @property
    def last_redirect_s(self) -> float:
        """On the clock of time.monotonic(); 0 when there was none."""
        return self._words[Word.LAST_NS] / 1e9

    @property
    def overlapped(self) -> bool:
        """A retransmission brought bytes a second time: what was read since cannot be trusted."""
        return self._words[Word.OVERLAPS] != 0

    @property
    def node_closed(self) -> bool:
        return self._words[Word.FIN] != 0

    def wants_to_be_read(self, position: int) -> bool:
        """Whether so much was redirected behind `position` that user space is woken for it."""
        words = self._words
        return (
            words[Word.REDIRECTED] - position >= WAKE_BYTES
            or words[Word.SEGMENTS] - words[Word.CONSUMED_SEGMENTS] >= WAKE_SEGMENTS
        )

    def read_ring(self, start: int, end: int) -> bytes:
        """Redirected bytes from position `start` to `end`, at most the newest RING_BYTES."""
        return read_ring(self._ring, start, end)

    # --- what it may do --------------------------------------------------------------------------------

    def splice(self, *, acked: int) -> None:
        """All of `acked` passed bytes are with the client; the next plain segment may go there by itself."""
        self._words[Word.ACKED] = acked
        self._words[Word.SPLICE] = 1

    def stop(self) -> None:
        """Everything is passed, once a verdict that is under way has ended (see tcp.wait_for_its_lock)."""
        self._words[Word.SPLICE] = 0

    def consume(self, redirected: int, segments: int) -> None:
        """The ring may be overwritten up to here."""
        self._words[Word.CONSUMED] = redirected
        self._words[Word.CONSUMED_SEGMENTS] = segments

    def arm(self) -> None:
        """Asks for one event as soon as there is something to do."""
        self._words[Word.ARMED] = 1


def read_ring(ring: memoryview, start: int, end: int) -> bytes:
    if end <= start:
        return b""
    low, high = start % RING_BYTES, end % RING_BYTES
    return bytes(ring[low:high]) if low < high else bytes(ring[low:]) + bytes(ring[:high])
