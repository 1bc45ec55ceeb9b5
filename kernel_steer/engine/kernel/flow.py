"""One answer's body on its way through the kernel.

While the route is open the kernel forwards plain events by itself. What it redirects is copied from the
ring afterwards, in bulk, into the journal and shown to the gate; for that the route stays open. What it
passes wakes user space, which closes the route and does as the relay does: gate, journal, write. The order
of both is known: the first passed byte ends the redirecting, until user space has written everything on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kernel_steer.engine.base import LegEnd, LegEnded
from kernel_steer.engine.kernel import recovery, tcp
from kernel_steer.engine.kernel.lane import UNACKED_MAX, Lane
from kernel_steer.engine.kernel.layout import RING_BYTES
from kernel_steer.engine.relay import RelayFlow
from kernel_steer.engine.wake import wait_readable

if TYPE_CHECKING:
    from kernel_steer.engine.kernel.engine import KernelEngine

log = logging.getLogger(__name__)
_READ_BYTES = RING_BYTES * 2
# What was redirected waits for a kernel worker and for nothing else, so this is far more than it takes.
_SETTLE_S = 5.0
_SETTLE_POLL_S = 0.0005


class KernelFlow(RelayFlow):
    """See Flow. Made by KernelEngine.open_flow."""

    def __init__(self, engine: KernelEngine, lane: Lane, *, base: int, **relayed: Any) -> None:
        """`base` is what the client's TCP had accepted before this flow, on the scale of tcp.progress."""
        super().__init__(engine, **relayed)
        self._kernel = engine
        self._lane = lane
        self._read_count = 0  # of the passed bytes
        self._mirrored = 0  # of the redirected bytes: copied into the journal
        self._mirrored_segments = 0  # as many segments they were, or one more
        self._settled = 0  # of the mirrored bytes: known to be with the client's TCP
        self._base = base - self._slot.delivered
        self._heard_at = time.monotonic()
        self._over: LegEnd | None = None  # how it will end, once everything is told
        self._detail = ""
        self._hung_up = False
        self._route_open = False
        self._looked = False  # at what was queued before the program saw the socket
        self._sleeper: asyncio.Future[None] | None = None

    @property
    def delivered(self) -> int:
        """See Flow.delivered."""
        waiting = self._lane.redirected - self._mirrored if self._backend is not None else 0
        return self._slot.delivered + waiting

    async def next(self, timeout_s: float) -> None:
        """See Flow.next. While the kernel forwards, it returns once in about forty events."""
        while True:
            if self._ended is not None or self._backend is None:
                raise LegEnded(self._ended or LegEnd.EOF, self._detail)
            if await self._advance():
                return
            if self._over is None and not await self._sleep(timeout_s):
                self._close_route()
                if self._mirror():
                    return  # it came in the very last moment: the node is alive
                self._over = LegEnd.STALLED
            if self._over is not None:
                self._close_route()
                if self._mirrored == self._lane.redirected:
                    await self._settle()
                    self._end(self._over, self._detail)

    # --- moving on ---------------------------------------------------------------------------------------

    async def _advance(self) -> bool:
        """Handles what is there. True when more reached the client."""
        if self._route_open and not self._wants_attention():
            return self._lane.wants_to_be_read(self._mirrored) and self._mirror()
        self._close_route()
        if self._watch.gone:
            self._end(LegEnd.CLIENT_GONE)
        data, self._pending = self._pending, b""
        if not data and self._over is None:
            data = self._receive()
        # What was redirected came before what was passed.
        progress = self._mirror()
        if self._over is None and self._lane.overlapped:
            # Bytes that came twice were passed or redirected twice. Nothing after them is shown.
            self._over, self._detail = LegEnd.BAD, "a retransmission overlapped"
        if data and self._over is not LegEnd.BAD:
            await self._settle()
            progress |= await self._forward(data)
            self._heard_at = time.monotonic()
        return progress

    def _wants_attention(self) -> bool:
        """Something has come, or will, that is not redirected."""
        lane = self._lane
        return (
            self._over is not None
            or self._watch.gone
            or self._hung_up
            or lane.passed != self._read_count
            or lane.node_closed
            or lane.overlapped
        )

    def _receive(self) -> bytes:
        assert self._backend is not None
        if self._looked and not self._wants_attention():
            return b""
        self._looked = True
        try:
            data = self._backend.recv(_READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            self._over, self._detail = LegEnd.RESET, error.strerror or ""
            return b""
        if not data:
            self._over = LegEnd.EOF
        self._read_count += len(data)
        return data

    def _mirror(self) -> bool:
        """Takes what the kernel has redirected into the journal, and shows it to the gate."""
        data = self._copy()
        if not data:
            return False
        if self._gate(data) < self._slot.delivered:
            # The program took for an event what is none. It is out; nothing more will be.
            self._over, self._detail = LegEnd.BAD, "the node's events are not valid"
        return True

    def _copy(self) -> bytes:
        # In this order: the program may be counting on meanwhile, bytes before segments.
        segments = self._lane.segments
        position = self._lane.redirected
        data = self._lane.read_ring(self._mirrored, position)
        if data:
            self._slot.append(data)
            self._slot.mark_delivered(self._slot.delivered + len(data))
            self._mirrored, self._mirrored_segments = position, segments
            self._engine.stats.bytes_forwarded += len(data)
        return data

    async def _settle(self) -> None:
        """Rule 2 of the hand-over: waits until the client's TCP has all that was redirected."""
        deadline = time.monotonic() + _SETTLE_S
        while not self._is_settled():
            if time.monotonic() > deadline:
                self._cut_client()
            await asyncio.sleep(_SETTLE_POLL_S)

    def _is_settled(self) -> bool:
        """Raises LegEnded when the client is gone."""
        if self._settled == self._mirrored:
            return True
        now = self._client_progress()
        if now.accepted - self._base < self._slot.delivered:
            return False
        self._settled = self._mirrored
        return True

    def _cut_client(self) -> None:
        """Bytes that were sent on cannot be called back, and nobody knows when they go out."""
        log.error("the kernel does not deliver what it took; the client's connection is cut")
        self._watch.gone = True
        self._client.shutdown(2)
        self._end(LegEnd.CLIENT_GONE)

    # --- sleeping ----------------------------------------------------------------------------------------

    async def _sleep(self, timeout_s: float) -> bool:
        """Lets the kernel forward until there is something to do. False after `timeout_s` of silence."""
        assert self._backend is not None
        self._open_route()
        self._lane.arm()
        # A verdict that began before we asked has ended after this; a later one sees that we asked.
        tcp.wait_for_its_lock(self._backend)
        left_s = max(self._heard_at, self._lane.last_redirect_s) + timeout_s - time.monotonic()
        if left_s <= 0:
            return False
        if self._wants_attention():
            # It can be read already, or a kernel worker is still bringing it: no verdict will tell.
            self._close_route()
            return await wait_readable(self._backend, left_s, self._watch) or self._watch.gone
        await self._wait_to_be_woken(left_s)
        return True  # the next round finds out why

    def _open_route(self) -> None:
        """Rule 1 of the hand-over: when all that was passed is with the client, and the client keeps up."""
        if not self._slot.delivered or self._held or self._hung_up or self._over is not None:
            return
        if self._client_progress().unacked > UNACKED_MAX:
            self._close_route()
            return
        self._lane.consume(self._mirrored, self._mirrored_segments)
        if not self._route_open:
            self._route_open = True
            # Bytes that were passed meanwhile make the counts differ, and nothing is redirected.
            self._lane.splice(acked=self._read_count)

    def _client_progress(self) -> tcp.Progress:
        """Raises LegEnded when the client is gone: while the kernel writes, no write of ours would tell."""
        try:
            now = tcp.progress(self._client)
        except OSError as error:  # its owner has closed it
            self._ended = LegEnd.CLIENT_GONE
            raise LegEnded(LegEnd.CLIENT_GONE, error.strerror or "") from error
        if not now.alive:
            self._end(LegEnd.CLIENT_GONE)
        return now

    def _close_route(self) -> None:
        if self._route_open:
            self._route_open = False
            self._lane.stop()
            if self._backend is not None:
                tcp.wait_for_its_lock(self._backend)

    async def _wait_to_be_woken(self, timeout_s: float) -> None:
        sleeper = self._sleeper = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(timeout_s, self.wake)
        self._watch.listen(self.wake)
        try:
            if not self._watch.gone:
                await sleeper
        finally:
            timer.cancel()
            self._watch.unlisten(self.wake)

    def wake(self) -> None:
        """The program, the clock or the client wants attention."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def hang_up(self) -> None:
        """The node's connection has ended or is half-closed."""
        self._hung_up = True
        self.wake()

    # --- the end -----------------------------------------------------------------------------------------

    def fence(self) -> int:
        """See Flow.fence. Waits, without giving way, for the kernel worker when something is under way."""
        if self._backend is not None:
            self._close_route()
            self._mirror()
            self._drain()
            recovery.clear_stamp(self._slot)
            self._kernel.close_lane(self, self._lane, self._backend)
        return super().fence()

    def _drain(self) -> None:
        deadline = time.monotonic() + _SETTLE_S
        try:
            while not self._is_settled():
                if time.monotonic() > deadline:
                    self._cut_client()
                time.sleep(_SETTLE_POLL_S)
        except LegEnded:
            # What the client's TCP did not take any more was not delivered. A closed socket cannot be asked.
            with suppress(OSError):
                accepted = tcp.progress(self._client).accepted - self._base
                self._slot.mark_delivered(max(0, min(self._slot.delivered, accepted)))
