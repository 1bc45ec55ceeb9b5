"""One answer from first leg to last word, whatever happens to the nodes.

    pick a node -> open a leg -> carry it -> complete? done : fence, continue on another node

The first leg of a streamed answer is spliced by the engine, byte for byte. A continuing leg is asked
for with `prompt ids + emitted ids`, read here, and told to the client in the words of the first leg.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kernel_steer.admission import Admission, Answer, LegReport, Node, Outcome, Refusal, Ticket
from kernel_steer.engine.base import Engine, LegEnd, LegEnded, NodeFlipped, NodeKey
from kernel_steer.engine.wake import wait_readable
from kernel_steer.journal import Slot
from kernel_steer.resume.chunked import ChunkedDecoder, Phase
from kernel_steer.resume.classify import ResumeClass
from kernel_steer.resume.joint import CannotComplete, Joint
from kernel_steer.resume.leg import ClientLeft, Leg, LegFailed, LegRefused, open_leg
from kernel_steer.resume.reader import Event, LegReader
from kernel_steer.resume.recount import recount
from kernel_steer.resume.sink import ClientGone, CollectSink, StreamSink
from kernel_steer.resume.state import AnswerState
from kernel_steer.resume.tokens import Detokenizer, TokenizerStore, TokenizerUnavailable

log = logging.getLogger(__name__)
_READ_BYTES = 32768


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds."""

    head_s: float = 120.0  # request sent to head of the answer, prefill included
    done_gap_s: float = 1.0  # between finish_reason and [DONE]
    token_gap_s: float = 20.0  # between two pieces of an answer; then the node is taken for dead
    search_s: float = 10.0  # without a node: then the answer fails
    first_search_s: float = 2.0  # the same before anything was said: then 503
    ping_s: float = 1.0
    poll_s: float = 0.02
    legs_max: int = 5


@dataclass(frozen=True, slots=True)
class Work:
    """A request as the relay needs it."""

    request_id: str
    model: str
    body: dict[str, Any]  # for a node's /v1/chat/completions
    sampling: dict[str, Any]  # the part that a continuation repeats
    completion_tokens_max: int | None
    min_tokens: int
    choices: int
    include_usage: bool
    resume_class: ResumeClass


@dataclass(slots=True)
class Services:
    """What every run of this gateway shares."""

    admission: Admission
    engine: Engine
    tokenizers: TokenizerStore
    limits: Limits = field(default_factory=Limits)
    on_first_byte: Callable[[Node], None] = lambda node: None


class _LegLost(Exception):
    """The leg ended before the answer was complete."""

    def __init__(self, how: str, detail: str = "") -> None:
        super().__init__(detail or how)
        self.how = how


class _GiveUp(Exception):
    """No way to go on; the client is told."""


class AnswerRun:
    def __init__(
        self, work: Work, ticket: Ticket, sink: StreamSink | CollectSink, slot: Slot, services: Services
    ) -> None:
        self.work = work
        self.ticket = ticket
        self.sink = sink
        self.slot = slot
        self.services = services
        self.limits = services.limits
        self.state = AnswerState()
        self.legs: list[LegReport] = []
        self.resume_gap_s: float | None = None
        self._detokenizer: Detokenizer | None = None
        self._lost: set[str] = set()
        self._last_progress = time.monotonic()
        self._first_byte_told = False
        self._started_at = datetime.now(UTC)

    async def run(self) -> Answer:
        """Tells the answer to the sink. Raises Refusal when nothing was told and nothing can be."""
        try:
            await self._carry_to_the_end()
            outcome = Outcome.COMPLETED
        except (ClientGone, ClientLeft):
            outcome = Outcome.CLIENT_GONE
        except _GiveUp as error:
            log.warning("request %s given up: %s", self.work.request_id, error)
            await self._tell_failure(str(error))
            outcome = Outcome.FAILED
        return self.answer(outcome)

    def answer(self, outcome: Outcome) -> Answer:
        """What was delivered so far, from the journal: the same count that a recovery would make."""
        counted = recount(self.slot.checkpoint, self.slot.uncounted(), choices=self.work.choices)
        return Answer(
            request_id=self.work.request_id,
            record=self.ticket.record,
            outcome=outcome,
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            legs=list(self.legs),
            started_at=self._started_at,
            finished_at=datetime.now(UTC),
        )

    # --- legs ---------------------------------------------------------------------------------------

    async def _carry_to_the_end(self) -> None:
        while self.state.finish_reason is None:
            if self._ended_without_saying_so():
                break
            leg = await self._open_next_leg()
            emitted = len(self.state.ids)
            ended = "client_gone"
            try:
                await self._carry(leg)
                ended = "completed"
            except _LegLost as lost:
                ended = lost.how
                self.services.admission.node_failed(leg.node.name, leg.node.epoch, f"{lost.how}: {lost}")
                self._lost.add(leg.node.name)
                log.info(
                    "request %s: leg %d on %s ended: %s (%s)",
                    self.work.request_id,
                    leg.number,
                    leg.node.name,
                    lost.how,
                    lost,
                )
            finally:
                leg.sock.close()
                self.services.admission.node_released(leg.node.name, leg.node.epoch)
                self.legs.append(self._report(leg, emitted, ended))
            if self.state.finish_reason is None:
                await self._prepare_resume()
        await self._say_the_end()

    def _report(self, leg: Leg, emitted_before: int, ended: str) -> LegReport:
        return LegReport(
            number=leg.number,
            node=leg.node.name,
            prompt_tokens=len(self.state.prompt_ids or ()) + emitted_before,
            completion_tokens=len(self.state.ids) - emitted_before,
            ended=ended,
        )

    async def _prepare_resume(self) -> None:
        """Everything that can be got ready before there is another node."""
        if not self.sink.streaming:
            if self.work.resume_class is ResumeClass.NONE:
                self.state = AnswerState()  # nothing was told: the next node answers from the beginning
            return
        if not self.state.ids:
            return  # nothing was said yet: the next leg starts from the same point, whatever the class
        if self.work.resume_class is ResumeClass.NONE:
            raise _GiveUp(
                "the node was lost, and this request's parameters do not allow an exact continuation"
            )
        if self.state.prompt_ids is None:
            raise _GiveUp("the node was lost and had not reported its prompt tokens")

    async def _open_next_leg(self) -> Leg:
        started = time.monotonic()
        patience = self.limits.search_s if self.told else self.limits.first_search_s
        while True:
            if len(self.legs) >= self.limits.legs_max:
                raise self._failure("too many nodes were lost during this answer")
            node = await self._find_node(started, patience)
            opened = False
            try:
                leg = await self._open_leg(node)
                opened = True
            except LegFailed as error:
                log.info("request %s: node %s took no leg: %s", self.work.request_id, node.name, error)
                self.services.admission.node_failed(node.name, node.epoch, str(error))
                self._lost.add(node.name)
            except LegRefused as error:
                if self.told:
                    raise _GiveUp("the standby refused the continuation") from error
                raise Refusal(
                    error.status, error.code or "invalid_request", error.message, param=error.param
                ) from error
            finally:
                if not opened:
                    self.services.admission.node_released(node.name, node.epoch)
            if opened:
                return leg

    async def _find_node(self, started: float, patience_s: float) -> Node:
        next_ping = time.monotonic() + self.limits.ping_s
        choose = self.services.admission.choose_node
        while True:
            # A node that was lost before is better than none: it may have come back.
            node = choose(self.work.model, exclude=frozenset(self._lost)) or choose(self.work.model)
            if node is not None:
                return node
            now = time.monotonic()
            if self.sink.watch.gone:
                raise ClientGone
            if now - started > patience_s:
                raise self._failure("no node is available to serve this model")
            if now > next_ping:
                await self.sink.ping()
                next_ping = now + self.limits.ping_s
            await asyncio.sleep(self.limits.poll_s)

    async def _open_leg(self, node: Node) -> Leg:
        if self._continues:
            path, body = "/v1/completions", self._continuation()
            await self._load_tokenizer(node)
        else:
            path, body = "/v1/chat/completions", self.work.body
            if node.tokenizer_id and self.work.resume_class is ResumeClass.APPEND:
                self.services.tokenizers.warm(node.tokenizer_id, [_url(node)])
        return await open_leg(
            number=len(self.legs) + 1,
            node=node,
            path=path,
            body=body,
            request_id=self.work.request_id,
            timeout_s=self.limits.head_s,
            watch=self.sink.watch,
        )

    @property
    def _continues(self) -> bool:
        """The next leg goes on from ids; otherwise it starts from the messages."""
        return bool(self.state.ids)

    def _continuation(self) -> dict[str, Any]:
        body = self.work.sampling | {
            "model": self.work.model,
            "prompt": (self.state.prompt_ids or []) + self.state.ids,
            "max_tokens": self._tokens_left(),
            "stream": True,
            "return_token_ids": True,
        }
        if (min_tokens := self.work.min_tokens - len(self.state.ids)) > 0:
            body["min_tokens"] = min_tokens
        return body

    def _tokens_left(self) -> int:
        used = len(self.state.ids)
        room = self.ticket.model.context_tokens - len(self.state.prompt_ids or ()) - used
        wanted = self.work.completion_tokens_max
        return room if wanted is None else min(room, wanted - used)

    def _ended_without_saying_so(self) -> bool:
        """The last token was delivered and only the words "it is finished" were lost with the node."""
        if not self.state.ids:
            return False
        if self._tokens_left() <= 0:
            self.state.finish_reason = "length"
        elif self._detokenizer is not None and self._detokenizer.is_special(self.state.ids[-1]):
            self.state.finish_reason = "stop"
        else:
            return False
        return True

    async def _load_tokenizer(self, node: Node) -> None:
        if self._detokenizer is not None:
            return
        try:
            self._detokenizer = await self.services.tokenizers.get(node.tokenizer_id, [_url(node)])
        except TokenizerUnavailable as error:
            raise LegFailed(str(error)) from error
        self.state.continue_with(self._detokenizer)

    # --- carrying ------------------------------------------------------------------------------------

    async def _carry(self, leg: Leg) -> None:
        """Until the leg completed the answer. Raises _LegLost, ClientGone or ClientLeft."""
        self.slot.start_leg(leg.number)
        if isinstance(self.sink, StreamSink):
            await self.sink.begin(leg.node.name)
            if self.sink.untouched:
                await self._splice(leg, self.sink)
                return
        await self._pull(leg)

    async def _splice(self, leg: Leg, sink: StreamSink) -> None:
        """The engine carries the body verbatim; here it is only counted."""
        reader = LegReader(self.state.note, choices=self.work.choices)
        try:
            flow = self.services.engine.open_flow(
                watch=sink.watch,
                backend=leg.sock,
                node=NodeKey(leg.node.name, leg.node.epoch),
                slot=self.slot,
                gate=reader.feed,
                already_read=leg.rest,
            )
        except NodeFlipped as error:
            raise _LegLost("flipped", "the node went away before it began") from error
        lost: _LegLost | None = None
        try:
            while reader.decoder.phase is not Phase.END and reader.bad is None:
                # After the finish_reason only [DONE] is missing, and we can say that ourselves.
                await flow.next(self.limits.done_gap_s if reader.complete else self.limits.token_gap_s)
                self._save(reader)
                self._progress(leg)
        except LegEnded as end:
            if end.reason is LegEnd.CLIENT_GONE:
                raise ClientGone from end
            lost = _LegLost(end.reason.value, str(end))
        finally:
            flow.fence()
        sink.joint = self._joint(reader)
        if not reader.complete:
            raise lost or _LegLost("bad", str(reader.bad or "it ended without a finish_reason"))

    def _joint(self, reader: LegReader) -> Joint:
        """Where the client stands now that the node is fenced off."""
        if reader.decoder.phase is Phase.END and reader.safe == reader.decoder.position:
            return Joint(reader.decoder)
        boundary = ChunkedDecoder.resume(position=reader.safe, chunk_rest=reader.safe_chunk_rest)
        joint = Joint.after(decoder=boundary, delivered_since=self.slot.uncounted())
        if (event := joint.take_whole_event()) is not None:
            self.state.note(event)
            self.save_told()
        return joint

    def _progress(self, leg: Leg) -> None:
        if not self._first_byte_told:
            self._first_byte_told = True
            self.services.on_first_byte(leg.node)
        self._last_progress = time.monotonic()

    def _save(self, reader: LegReader) -> None:
        self.slot.save(
            replace(
                self.slot.checkpoint,
                counted=reader.safe,
                chunk_rest=reader.safe_chunk_rest,
                prompt_tokens=len(self.state.prompt_ids or ()),
                completion_tokens=len(self.state.ids),
                finished=reader.complete,
            )
        )

    async def _pull(self, leg: Leg) -> None:
        """The leg is read here and told event by event."""
        events: list[Event] = []
        continuing, told_before = self._continues, bool(self.state.envelope)
        reader = LegReader(events.append, choices=self.work.choices)
        data = leg.rest
        lost: _LegLost | None = None
        while not reader.complete and lost is None:
            if data:
                reader.feed(data)
                if reader.bad is not None:
                    lost = _LegLost("bad", str(reader.bad))
            for event in events:
                await self._tell(event, leg, continuing=continuing, told_before=told_before)
            events.clear()
            if not reader.complete and lost is None:
                try:
                    data = await self._read(leg)
                except _LegLost as error:
                    lost = error
        if lost is not None and not reader.complete:
            raise lost

    async def _read(self, leg: Leg) -> bytes:
        watch = self.sink.watch
        if not await wait_readable(leg.sock, self.limits.token_gap_s, watch):
            if watch.gone:
                raise ClientGone
            raise _LegLost("stalled")
        try:
            data = leg.sock.recv(_READ_BYTES)
        except OSError as error:
            raise _LegLost("reset", error.strerror or "") from error
        if not data:
            raise _LegLost("eof")
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
            if event.finish_reason and self._detokenizer is not None:
                text += self.state.flush(self._detokenizer)
            body = self.state.chunk(ids=event.token_ids, text=text, finish_reason=event.finish_reason)
        else:
            self.state.note(event)
            body = self.state.envelope | {k: v for k, v in event.body.items() if k not in self.state.envelope}
        if event.finish_reason:
            self.state.finish_reason, self.state.finish_told = event.finish_reason, True
        await self._send_counted(body)
        if told_before and self.resume_gap_s is None:
            self.resume_gap_s = time.monotonic() - self._last_progress
            log.info(
                "request %s goes on at %s after %.0f ms",
                self.work.request_id,
                leg.node.name,
                self.resume_gap_s * 1000,
            )
        self._progress(leg)

    async def _send_counted(self, body: dict[str, Any]) -> None:
        """Counted before it is sent, for the reason given in RelayFlow; taken back when it was not."""
        before = self.slot.checkpoint
        if self.sink.streaming:
            self.save_told()
        try:
            await self.sink.event(body)
        except ClientGone:
            self.slot.save(before)
            raise

    def _check_prompt(self, event: Event, *, continuing: bool) -> None:
        """The node must have continued exactly what was said; otherwise its words are not ours."""
        told = event.prompt_token_ids
        if (
            continuing
            and told is not None
            and len(told) != len(self.state.prompt_ids or ()) + len(self.state.ids)
        ):
            raise _LegLost("bad", "the standby read another prompt than it was given")

    def document(self) -> dict[str, Any]:
        """A collected answer as one chat.completion object."""
        message = {"role": "assistant", "content": self.state.text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.state.finish_reason}
        envelope = self.state.envelope | {"object": "chat.completion"}
        return envelope | {"choices": [choice], "usage": self.state.usage()}

    def save_told(self) -> None:
        """Everything in the state has reached the client."""
        self.slot.save(
            replace(
                self.slot.checkpoint,
                prompt_tokens=len(self.state.prompt_ids or ()),
                completion_tokens=len(self.state.ids),
                finished=self.state.finish_reason is not None,
            )
        )

    # --- the end ---------------------------------------------------------------------------------------

    async def _say_the_end(self) -> None:
        """Whatever of finish_reason, usage and [DONE] the client has not been told."""
        if not isinstance(self.sink, StreamSink) or self.sink.joint.decoder.phase is Phase.END:
            return
        if not self.state.finish_told:
            text = self.state.flush(self._detokenizer) if self._detokenizer else ""
            await self.sink.event(self.state.chunk(ids=[], text=text, finish_reason=self.state.finish_reason))
        if self.work.include_usage and not self.state.usage_told:
            await self.sink.event(self.state.usage_chunk())
        await self.sink.finish(done=self.state.done_told)

    async def _tell_failure(self, message: str) -> None:
        if not isinstance(self.sink, StreamSink):
            return
        try:
            await self.sink.error(
                {"message": message, "type": "server_error", "param": None, "code": "node_lost"}
            )
        except (ClientGone, CannotComplete):
            log.info("request %s: the client could not be told", self.work.request_id)

    @property
    def told(self) -> bool:
        """Something of this answer has been said, so that an HTTP error is no longer possible."""
        return isinstance(self.sink, StreamSink) and self.sink.begun

    def _failure(self, message: str) -> Exception:
        if self.told:
            return _GiveUp(message)
        return Refusal(
            503, "no_node", f"{message[0].upper()}{message[1:]}. Try again shortly.", retry_after_s=2
        )


def _url(node: Node) -> str:
    return f"http://{node.host}:{node.port}"
