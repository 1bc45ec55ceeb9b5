"""Carries one leg of an answer to the client, and counts what arrived.

Two ways. `splice`: the engine forwards the node's bytes as they are, and here they are only counted.
`pull`: the leg is read here and told event by event; so go legs that continue another one, whose text has
to be made from ids, and answers that are collected into one document.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from kernel_steer.engine.base import LegEnd, LegEnded, NodeFlipped, NodeKey
from kernel_steer.engine.wake import wait_readable
from kernel_steer.journal import Slot
from kernel_steer.resume.chunked import ChunkedDecoder, Phase
from kernel_steer.resume.joint import Joint
from kernel_steer.resume.leg import Leg
from kernel_steer.resume.reader import Event, LegReader
from kernel_steer.resume.sink import ClientGone, CollectSink, StreamSink
from kernel_steer.resume.state import AnswerState
from kernel_steer.resume.tokens import Detokenizer
from kernel_steer.resume.work import LegLost, Services, Work

log = logging.getLogger(__name__)
_READ_BYTES = 32768


class Carrier:
    """One per answer. `state` is what is known of it, `detokenizer` is there once a leg had to continue."""

    def __init__(self, work: Work, sink: StreamSink | CollectSink, slot: Slot, services: Services) -> None:
        self.state = AnswerState()
        self.detokenizer: Detokenizer | None = None
        self._work = work
        self._sink = sink
        self._slot = slot
        self._services = services
        self._limits = services.limits
        self._last_progress = time.monotonic()
        self._first_byte_told = False
        self._resumed = False

    @property
    def continues(self) -> bool:
        """The next leg goes on from ids; otherwise it starts from the messages."""
        return bool(self.state.ids)

    def restart(self) -> None:
        """Forgets what was read; only while nothing of it was told."""
        self.state = AnswerState()

    async def carry(self, leg: Leg) -> None:
        """Returns when the leg has completed the answer. Raises LegLost or ClientGone."""
        self._slot.start_leg(leg.number)
        if isinstance(self._sink, StreamSink):
            await self._sink.begin(leg.node.name)
            if self._sink.untouched:
                await self._splice(leg, self._sink)
                return
        await self._pull(leg)

    def save_told(self) -> None:
        """Everything in the state has reached the client."""
        self._slot.save(
            replace(
                self._slot.checkpoint,
                prompt_tokens=len(self.state.prompt_ids or ()),
                completion_tokens=len(self.state.ids),
                finished=self.state.finish_reason is not None,
            )
        )

    # --- splice --------------------------------------------------------------------------------------

    async def _splice(self, leg: Leg, sink: StreamSink) -> None:
        """The engine carries the body verbatim; here it is only counted."""
        reader = LegReader(self.state.note, choices=self._work.choices)
        try:
            flow = self._services.engine.open_flow(
                watch=sink.watch,
                backend=leg.sock,
                node=NodeKey(leg.node.name, leg.node.epoch),
                slot=self._slot,
                gate=reader.feed,
                already_read=leg.rest,
            )
        except NodeFlipped as error:
            raise LegLost("flipped", "the node went away before it began") from error
        lost: LegLost | None = None
        try:
            while reader.decoder.phase is not Phase.END and reader.bad is None:
                # After the finish_reason only [DONE] is missing, and we can say that ourselves.
                await flow.next(self._limits.done_gap_s if reader.complete else self._limits.token_gap_s)
                self._save(reader)
                self._progress(leg)
        except LegEnded as end:
            if end.reason is LegEnd.CLIENT_GONE:
                raise ClientGone from end
            lost = LegLost(end.reason.value, str(end))
        finally:
            flow.fence()
        sink.joint = self._joint(reader)
        if not reader.complete:
            raise lost or LegLost("bad", str(reader.bad or "it ended without a finish_reason"))

    def _joint(self, reader: LegReader) -> Joint:
        """Where the client stands now that the node is fenced off."""
        if reader.decoder.phase is Phase.END and reader.safe == reader.decoder.position:
            return Joint(reader.decoder)
        boundary = ChunkedDecoder.resume(position=reader.safe, chunk_rest=reader.safe_chunk_rest)
        joint = Joint.after(decoder=boundary, delivered_since=self._slot.uncounted())
        if (event := joint.take_whole_event()) is not None:
            self.state.note(event)
            self.save_told()
        return joint

    def _save(self, reader: LegReader) -> None:
        self._slot.save(
            replace(
                self._slot.checkpoint,
                counted=reader.safe,
                chunk_rest=reader.safe_chunk_rest,
                prompt_tokens=len(self.state.prompt_ids or ()),
                completion_tokens=len(self.state.ids),
                finished=reader.complete,
            )
        )

    def _progress(self, leg: Leg) -> None:
        if not self._first_byte_told:
            self._first_byte_told = True
            self._services.on_first_byte(leg.node)
        self._last_progress = time.monotonic()

    # --- pull ----------------------------------------------------------------------------------------

    async def _pull(self, leg: Leg) -> None:
        """The leg is read here and told event by event."""
        events: list[Event] = []
        continuing, told_before = self.continues, bool(self.state.envelope)
        reader = LegReader(events.append, choices=self._work.choices)
        data = leg.rest
        lost: LegLost | None = None
        while not reader.complete and lost is None:
            if data:
                reader.feed(data)
                if reader.bad is not None:
                    lost = LegLost("bad", str(reader.bad))
            for event in events:
                await self._tell(event, leg, continuing=continuing, told_before=told_before)
            events.clear()
            if not reader.complete and lost is None:
                try:
                    data = await self._read(leg)
                except LegLost as error:
                    lost = error
        if lost is not None and not reader.complete:
            raise lost

    async def _read(self, leg: Leg) -> bytes:
        watch = self._sink.watch
        if not await wait_readable(leg.sock, self._limits.token_gap_s, watch):
            if watch.gone:
                raise ClientGone
            raise LegLost("stalled")
        try:
            data = leg.sock.recv(_READ_BYTES)
        except OSError as error:
            raise LegLost("reset", error.strerror or "") from error
        if not data:
            raise LegLost("eof")
        return data

    async def _tell(self, event: Event, leg: Leg, *, continuing: bool, told_before: bool) -> None:
        if event.body is None or not event.choices:
            return  # usage and [DONE] are said by us, over all legs
        if told_before and not event.token_ids and event.finish_reason is None:
            self._check_prompt(event, continuing=continuing)
            return  # the role is said once
        if continuing:
            self._check_prompt(event, continuing=continuing)
            text = self.state.extend(event.token_ids)
            if event.finish_reason and self.detokenizer is not None:
                text += self.state.flush(self.detokenizer)
            body = self.state.chunk(ids=event.token_ids, text=text, finish_reason=event.finish_reason)
        else:
            self.state.note(event)
            body = self.state.envelope | {k: v for k, v in event.body.items() if k not in self.state.envelope}
        if event.finish_reason:
            self.state.finish_reason, self.state.finish_told = event.finish_reason, True
        await self._send_counted(body)
        if told_before and not self._resumed:
            self._resumed = True
            gap_ms = (time.monotonic() - self._last_progress) * 1000
            log.info("request %s goes on at %s after %.0f ms", self._work.request_id, leg.node.name, gap_ms)
        self._progress(leg)

    async def _send_counted(self, body: dict[str, Any]) -> None:
        """Counted before it is sent, for the reason given in RelayFlow; taken back when it was not."""
        before = self._slot.checkpoint
        if self._sink.streaming:
            self.save_told()
        try:
            await self._sink.event(body)
        except ClientGone:
            self._slot.save(before)
            raise

    def _check_prompt(self, event: Event, *, continuing: bool) -> None:
        """The node must have continued exactly what was said; otherwise its words are not ours."""
        told = event.prompt_token_ids
        if (
            continuing
            and told is not None
            and len(told) != len(self.state.prompt_ids or ()) + len(self.state.ids)
        ):
            raise LegLost("bad", "the standby read another prompt than it was given")
