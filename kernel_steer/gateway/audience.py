"""The clients of one answer, when there may be several: the first one, and its own repetitions.

An answer under an Idempotency-Key is told to an audience instead of a client. Whoever comes hears it from
its first byte. It goes on while anybody listens, and for some seconds after the last one left: the usual
reason to send a request again is that its connection broke.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kernel_steer.admission import Refusal
from kernel_steer.engine.relay import CLIENT_STALL_S
from kernel_steer.engine.wake import ClientWatch, wait_writable
from kernel_steer.resume.sink import ClientGone, StreamSink

_PIECE_BYTES = 65536


@dataclass(slots=True, eq=False)
class _Seat:
    sock: socket.socket
    position: int = 0  # bytes of the answer that its TCP has accepted
    gone: bool = False


class Audience(ClientWatch):
    """Stands where an answer has the watch over its client: `gone` is true when nobody will come any more.

    `said` is the whole HTTP answer, head included; over `keep_bytes_max` it is let go, and then nobody can
    join any more. `patience_s()` is how long an answer waits for the next listener.
    """

    def __init__(self, *, keep_bytes_max: int, patience_s: Callable[[], float]) -> None:
        # Not ClientWatch's own: there is no single socket to watch.
        self.gone = False
        self.refusal: Refusal | None = None
        self.closed = False
        self._complete = False
        self.said = bytearray()
        self._listeners = set()
        self._first = 0  # position of said[0]
        self._keep_bytes_max = keep_bytes_max
        self._patience_s = patience_s
        self._seats: set[_Seat] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._farewell: asyncio.TimerHandle | None = None

    @property
    def is_whole(self) -> bool:
        """Everything that was said is still known."""
        return self._first == 0

    def stop(self) -> None:
        """Each listener's own watch ends with its seat."""

    # --- the answer's side --------------------------------------------------------------------------

    async def say(self, data: bytes) -> None:
        """Returns when a client's TCP has taken all of it. Raises ClientGone when none will.

        Tries before anything else gets a turn: what is counted as delivered and what is must not drift apart.
        """
        before = self._end
        self.said += data
        for seat in list(self._seats):
            if seat.position == before:
                self._push(seat)
        if len(self.said) > self._keep_bytes_max:
            self._let_go()
        self._wake()
        while not any(seat.position == self._end for seat in self._seats):
            if self.gone:
                raise ClientGone
            await self._change()

    def close(self, refusal: Refusal | None = None, *, complete: bool = True) -> None:
        """No more will be said. With a refusal nothing was; not `complete`: the answer broke off."""
        self.refusal = refusal
        self.closed = True
        self._complete = complete
        if self._farewell is not None:
            self._farewell.cancel()
        self._wake()

    # --- a client's side ----------------------------------------------------------------------------

    async def attend(self, sock: socket.socket) -> bool:
        """Tells the client everything; False when it, or the answer, did not get to the end.

        Raises the answer's Refusal, and 409 when the beginning is not known any more.
        """
        if not self.is_whole:
            raise in_flight("The answer to this request is under way and too long to be told twice.", 5)
        seat, watch = _Seat(sock), ClientWatch(sock)
        watch.listen(lambda: self._leave(seat))
        self._seats.add(seat)
        if self._farewell is not None:
            self._farewell.cancel()
        try:
            return await self._tell(seat)
        finally:
            watch.stop()
            self._leave(seat)

    async def _tell(self, seat: _Seat) -> bool:
        while not seat.gone:
            self._push(seat)
            if seat.position < self._end and not seat.gone:
                try:
                    await wait_writable(seat.sock, CLIENT_STALL_S)
                except TimeoutError:
                    return False
            elif self.closed:
                if self.refusal is not None:
                    raise self.refusal
                return self._complete
            elif not seat.gone:
                await self._change()
        return False

    def _push(self, seat: _Seat) -> None:
        """Writes as much as the client's TCP takes now."""
        while seat.position < self._end:
            start = seat.position - self._first
            if start < 0:
                seat.gone = True  # too slow: what comes next for it is not known any more
                return
            try:
                sent = seat.sock.send(bytes(self.said[start : start + _PIECE_BYTES]))
            except BlockingIOError:
                return
            except OSError:
                self._leave(seat)
                return
            seat.position += sent
            if seat.position == self._end:
                self._wake()

    def _leave(self, seat: _Seat) -> None:
        seat.gone = True
        if seat not in self._seats:
            return
        self._seats.remove(seat)
        self._wake()
        if not self._seats and not self.closed:
            self._farewell = asyncio.get_running_loop().call_later(self._patience_s(), self._give_up)

    def _give_up(self) -> None:
        if self._seats:
            return
        self.gone = True
        for listener in list(self._listeners):
            listener()
        self._wake()

    # --- both ---------------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return self._first + len(self.said)

    def _let_go(self) -> None:
        """Forgets what its fastest listener has."""
        heard = max((seat.position for seat in self._seats), default=self._first)
        del self.said[: heard - self._first]
        self._first = heard

    async def _change(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


class AudienceSink(StreamSink):
    """Server-sent events for an audience. Every event is told from here: an engine knows one client only."""

    def __init__(self, audience: Audience, head: bytes) -> None:
        super().__init__(audience, head)
        self._audience = audience

    @property
    def untouched(self) -> bool:
        return False

    async def _send(self, data: bytes) -> None:
        await self._audience.say(data)


def in_flight(message: str, retry_after_s: int) -> Refusal:
    return Refusal(409, "idempotency_in_flight", message, retry_after_s=retry_after_s)
