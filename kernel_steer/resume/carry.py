"""Carries one leg of an answer to the client, and counts what arrived.

Two ways. `splice`: the engine forwards the node's bytes as they are, and here they are only counted.
`pull`: the leg is read here and told event by event (see tell.py); so go legs that continue another one, the
choices of an answer that has several, servers without ids, and answers that are collected into one document.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, Protocol

from kernel_steer.admission import Resume
from kernel_steer.engine.base import BadLeg, LegEnd, LegEnded, NodeFlipped, NodeKey
from kernel_steer.engine.wake import wait_readable
from kernel_steer.journal import Checkpoint, Slot
from kernel_steer.resume.chunked import ChunkedDecoder, Phase
from kernel_steer.resume.joint import Joint
from kernel_steer.resume.leg import Leg
from kernel_steer.resume.pace import Pace
from kernel_steer.resume.reader import Event, LegReader
from kernel_steer.resume.sink import ClientGone, Sink, StreamSink
from kernel_steer.resume.state import AnswerState
from kernel_steer.resume.tell import Teller
from kernel_steer.resume.work import MOVED, LegLost, Services, Work

log = logging.getLogger(__name__)
_READ_BYTES = 32768


class Counted(Protocol):
    """As much of the journal as a leg needs that is told event by event."""

    checkpoint: Checkpoint

    def start_leg(self, number: int) -> None: ...

    def save(self, checkpoint: Checkpoint) -> None: ...


class Carrier:
    """One per choice of an answer. `state` is what is known of it."""

    def __init__(self, work: Work, sink: Sink, slot: Counted, services: Services) -> None:
        self._work = work
        self._sink = sink
        self._slot = slot
        self._services = services
        self._limits = services.limits
        self._pace = Pace(self._limits)
        self._last_progress = time.monotonic()
        self._last_told = work.received_at
        self._first_byte_told = False
        self._resumed = False
        self.leave = False  # the standby is ready: go at the next token
        self.spoke = False  # the leg that is, or was, carried has brought tokens
        self.restart()

    def restart(self) -> None:
        """Forgets what was read; only while nothing of it was told."""
        self.state = AnswerState(
            self._work.shape,
            keep_logprobs=not self._sink.streaming,
            usage_in_every_chunk=self._work.usage_in_every_chunk,
        )

    async def carry(self, leg: Leg) -> None:
        """Returns when the leg has completed the answer. Raises LegLost or ClientGone."""
        self._slot.start_leg(leg.number)
        self._pace = Pace(self._limits)
        self.spoke = False
        await self._sink.begin(leg.node.name)
        spliced = isinstance(self._sink, StreamSink) and self._sink.untouched
        if spliced and leg.node.resume is Resume.IDS:
            await self._until_it_speaks(leg)
            await self._splice(leg)
        else:
            await self._pull(leg)

    async def warm(self, leg: Leg) -> None:
        """Reads an answer that nobody gets: its node has read the prompt then. Raises LegLost."""
        reader = LegReader(lambda event: None)
        try:
            data = leg.rest
            while not reader.complete:
                reader.feed(data)
                if reader.bad is not None:
                    raise LegLost("bad", str(reader.bad))
                if not reader.complete:
                    data = await self._read(leg, self._limits.head_s, ping=False)
        finally:
            leg.sock.close()

    def save_told(self) -> None:
        """Everything in the state has reached the client."""
        self._slot.save(
            replace(
                self._slot.checkpoint,
                prompt_tokens=self.state.prompt_tokens,
                completion_tokens=self.state.completion_tokens,
                finished=self.state.finish_reason is not None,
            )
        )

    async def keep_alive(self, every_s: float) -> None:
        """Nothing new is said for a while; the client should not think that all is lost. Before the head is out
        nothing is sent: an error must still be able to have its status."""
        if self._sink.begun and self.quiet_left_s(every_s) == 0:
            self._last_told = time.monotonic()
            await self._sink.ping()

    def quiet_left_s(self, every_s: float) -> float | None:
        """Until the next sign of life is due, counted from the request on; None for a client that gets none."""
        return max(0.0, self._last_told + every_s - time.monotonic()) if self._sink.streaming else None

    # --- splice --------------------------------------------------------------------------------------

    async def _until_it_speaks(self, leg: Leg) -> None:
        """While the node reads a long prompt. Once an engine has the client, nobody else may write to it."""
        began = time.monotonic()
        while not leg.rest:
            left_s = began + self._limits.head_s - time.monotonic()
            if await wait_readable(leg.sock, min(self._limits.keep_alive_s, left_s), self._sink.watch):
                return
            if self._sink.watch.gone:
                raise ClientGone
            if left_s <= 0:
                raise LegLost("stalled")
            await self._sink.ping()

    async def _splice(self, leg: Leg) -> None:
        """The engine carries the body verbatim; here it is only counted."""
        sink, slot = self._sink, self._slot
        assert isinstance(sink, StreamSink)
        assert isinstance(slot, Slot)
        reader = LegReader(self.state.note, on_words=self.state.note_words)
        try:
            flow = self._services.engine.open_flow(
                watch=sink.watch,
                backend=leg.sock,
                node=NodeKey(leg.node.name, leg.node.epoch),
                slot=slot,
                gate=reader.feed,
                already_read=leg.rest,
            )
        except NodeFlipped as error:
            raise LegLost("flipped", "the node went away before it began") from error
        lost: LegLost | None = None
        try:
            while reader.decoder.phase is not Phase.END and reader.bad is None:
                # After the finish_reason only [DONE] is missing, and we can say that ourselves.
                silence_s = self._limits.done_gap_s if reader.complete else self._pace.silence_max_s
                before = len(self.state.ids)
                await flow.next(silence_s)
                self._save(slot, reader)
                self._progress(leg, len(self.state.ids) - before)
                if self.leave and not reader.complete:
                    lost = LegLost(MOVED)
                    break
        except LegEnded as end:
            if end.reason is LegEnd.CLIENT_GONE:
                raise ClientGone from end
            lost = LegLost(end.reason.value, str(end))
        finally:
            flow.fence()
        sink.joint = self._joint(slot, reader)
        if not reader.complete:
            raise lost or LegLost("bad", str(reader.bad or "it ended without a finish_reason"))

    def _joint(self, slot: Slot, reader: LegReader) -> Joint:
        """Where the client stands now that the node is fenced off."""
        if reader.decoder.phase is Phase.END and reader.safe == reader.decoder.position:
            return Joint(reader.decoder)
        boundary = ChunkedDecoder.resume(position=reader.safe, chunk_rest=reader.safe_chunk_rest)
        joint = Joint.after(decoder=boundary, delivered_since=slot.uncounted())
        if (event := joint.take_whole_event()) is not None:
            self.state.note(event)
            self.save_told()
        return joint

    def _save(self, slot: Slot, reader: LegReader) -> None:
        slot.save(
            replace(
                slot.checkpoint,
                counted=reader.safe,
                chunk_rest=reader.safe_chunk_rest,
                prompt_tokens=self.state.prompt_tokens,
                completion_tokens=self.state.completion_tokens,
                finished=reader.complete,
            )
        )

    def _progress(self, leg: Leg, tokens: int) -> None:
        if not self._first_byte_told:
            self._first_byte_told = True
            self._services.on_first_byte(leg.node)
        self._heard(leg, tokens)
        self._last_progress = self._last_told = time.monotonic()

    def _heard(self, leg: Leg, tokens: int) -> None:
        self._pace.note(tokens)
        if tokens and not self.spoke:
            self.spoke = True
            self._services.circuits.worked(leg.node.name, leg.node.epoch)

    # --- pull ----------------------------------------------------------------------------------------

    async def _pull(self, leg: Leg) -> None:
        """The leg is read here and told event by event."""
        events: list[Event] = []
        teller = Teller(self._work, self.state, leg)
        reader = LegReader(events.append)
        data = leg.rest
        while True:
            reader.feed(data)
            for event in events:
                await self._tell(event, leg, teller)
                if teller.over:
                    return
            events.clear()
            # A server without ids says its usage after the finish_reason, and that is all there is to count by.
            if reader.complete and (leg.node.resume is Resume.IDS or reader.done):
                return
            if reader.bad is not None:
                raise LegLost("bad", str(reader.bad))
            if self.leave:
                raise LegLost(MOVED)
            try:
                data = await self._read(
                    leg, self._limits.done_gap_s if reader.complete else self._pace.silence_max_s
                )
            except LegLost:
                if reader.complete:
                    return
                raise

    async def _read(self, leg: Leg, silence_s: float, *, ping: bool = True) -> bytes:
        """`ping`: nobody else writes to the client now."""
        watch = self._sink.watch
        began = time.monotonic()
        while not await wait_readable(leg.sock, min(silence_s, self._limits.keep_alive_s), watch):
            if watch.gone:
                raise ClientGone
            if time.monotonic() - began >= silence_s:
                raise LegLost("stalled")
            if ping:
                await self._sink.ping()
        try:
            data = leg.sock.recv(_READ_BYTES)
        except OSError as error:
            raise LegLost("reset", error.strerror or "") from error
        if not data:
            raise LegLost("eof")
        return data

    async def _tell(self, event: Event, leg: Leg, teller: Teller) -> None:
        try:
            told = teller.take(event)
            self._heard(leg, teller.tokens_of(event))
        except BadLeg as error:
            raise LegLost("bad", str(error)) from error
        if told is None:
            if event.usage and self._sink.streaming:
                self.save_told()  # a server without ids has said how many tokens there were
            await self.keep_alive(self._limits.ping_s)
            return
        await self._send_counted(told)
        if teller.continues and not self._resumed:
            self._resumed = True
            gap_ms = (time.monotonic() - self._last_progress) * 1000
            log.info("request %s goes on at %s after %.0f ms", self._work.request_id, leg.node.name, gap_ms)
        self._progress(leg, 0)

    async def _send_counted(self, body: dict[str, Any]) -> None:
        """Counted after it was sent, for the reason given in RelayFlow."""
        await self._sink.event(body)
        if self._sink.streaming:
            self.save_told()
