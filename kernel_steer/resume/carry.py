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

from kernel_steer.engine.base import BadLeg, LegEnd, LegEnded, NodeFlipped, NodeKey
from kernel_steer.engine.wake import wait_readable
from kernel_steer.journal import Slot
from kernel_steer.resume.chunked import ChunkedDecoder, Phase
from kernel_steer.resume.joint import Joint
from kernel_steer.resume.leg import Leg, Mode
from kernel_steer.resume.reader import Event, LegReader
from kernel_steer.resume.sink import ClientGone, CollectSink, StreamSink
from kernel_steer.resume.state import AnswerState
from kernel_steer.resume.work import MOVED, Diverged, LegLost, Services, Work

log = logging.getLogger(__name__)
_READ_BYTES = 32768


class Carrier:
    """One per answer. `state` is what is known of it."""

    def __init__(self, work: Work, sink: StreamSink | CollectSink, slot: Slot, services: Services) -> None:
        self.state = AnswerState(work.shape)
        self._work = work
        self._sink = sink
        self._slot = slot
        self._services = services
        self._limits = services.limits
        self._last_progress = time.monotonic()
        self._last_told = self._last_progress
        self._first_byte_told = False
        self._resumed = False
        self.leave = False  # the standby is ready: go at the next token
        self._repeat: list[int] = []  # what a replay has still to say again

    def restart(self) -> None:
        """Forgets what was read; only while nothing of it was told."""
        self.state = AnswerState(self._work.shape)

    async def carry(self, leg: Leg) -> None:
        """Returns when the leg has completed the answer. Raises LegLost or ClientGone."""
        self._slot.start_leg(leg.number)
        if isinstance(self._sink, StreamSink):
            await self._sink.begin(leg.node.name)
            if self._sink.untouched:
                await self._splice(leg, self._sink)
                return
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
                    data = await self._read(leg)
        finally:
            leg.sock.close()

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
        reader = LegReader(self.state.note, on_words=self.state.note_words, choices=self._work.choices)
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
                if self.leave and not reader.complete:
                    lost = LegLost(MOVED)
                    break
        except LegEnded as end:
            if end.reason is LegEnd.CLIENT_GONE:
                raise ClientGone from end
            lost = LegLost(end.reason.value, str(end))
        finally:
            flow.fence()
        self._save(reader)  # the engine may have had a last look at what it forwarded
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
        self._last_progress = self._last_told = time.monotonic()

    # --- pull ----------------------------------------------------------------------------------------

    async def _pull(self, leg: Leg) -> None:
        """The leg is read here and told event by event."""
        events: list[Event] = []
        told_before = bool(self.state.envelope)
        self._repeat = list(self.state.ids)
        reader = LegReader(events.append, choices=self._work.choices)
        data = leg.rest
        while True:
            reader.feed(data)
            for event in events:
                try:
                    await self._tell(event, leg, told_before=told_before)
                except BadLeg as error:
                    raise LegLost("bad", str(error)) from error
                if self.state.stopped:
                    return
            events.clear()
            if reader.complete:
                return
            if reader.bad is not None:
                raise LegLost("bad", str(reader.bad))
            if self.leave:
                raise LegLost(MOVED)
            data = await self._read(leg)

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

    async def _tell(self, event: Event, leg: Leg, *, told_before: bool) -> None:
        if event.body is None or not event.choices:
            return  # usage and [DONE] are said by us, over all legs
        self._check_prompt(event, leg.mode)
        ids = self._new_ids(event) if leg.mode is Mode.REPLAY else event.token_ids
        if told_before and not ids and event.finish_reason is None:
            await self._keep_alive()
            return  # the role is said once, and what is repeated not at all
        if leg.mode is Mode.FRESH:
            self.state.note(event)
            body = self.state.envelope | {k: v for k, v in event.body.items() if k not in self.state.envelope}
        else:
            body = self._continuing_chunk(event, ids)
        await self._send_counted(body)
        if told_before and not self._resumed:
            self._resumed = True
            gap_ms = (time.monotonic() - self._last_progress) * 1000
            log.info("request %s goes on at %s after %.0f ms", self._work.request_id, leg.node.name, gap_ms)
        self._progress(leg)

    def _continuing_chunk(self, event: Event, ids: list[int]) -> dict[str, Any]:
        """The event in the words of the first leg, its text made from all ids of the answer."""
        state = self.state
        text = state.extend(ids)
        reason = "stop" if state.stopped else event.finish_reason
        if reason:
            text += state.flush()
            state.finish_reason, state.finish_told = reason, True
        logprobs = event.choices[0].get("logprobs") if ids == event.token_ids else None
        return state.chunk(ids=ids, text=text, finish_reason=reason, logprobs=logprobs)

    def _new_ids(self, event: Event) -> list[int]:
        """The ids of a replaying leg that the client does not have. Raises Diverged."""
        ids, known = event.token_ids, self._repeat
        if ids[: len(known)] != known[: len(ids)]:
            raise Diverged("another token than was said")
        self._repeat = known[len(ids) :]
        if event.finish_reason and self._repeat:
            raise Diverged("it ended before what was said")
        return ids[len(known) :]

    async def _keep_alive(self) -> None:
        """A replay says nothing new for a while; the client should not think that all is lost."""
        now = time.monotonic()
        if now - self._last_told > self._limits.ping_s:
            self._last_told = now
            await self._sink.ping()

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

    def _check_prompt(self, event: Event, mode: Mode) -> None:
        """The node must have read exactly what it was given; otherwise its words are not this answer's."""
        told = event.prompt_token_ids
        if told is None or self.state.prompt_ids is None:
            return
        if mode is Mode.APPEND and len(told) != len(self.state.prompt_ids) + len(self.state.ids):
            raise LegLost("bad", "the standby read another prompt than it was given")
        if mode is Mode.REPLAY and told != list(self.state.prompt_ids):
            raise Diverged("another prompt than the first node's")
