"""One answer from first leg to last word, whatever happens to the nodes.

    pick a node -> open a leg -> carry it -> complete? done : fence, continue on another node

The first leg of a streamed answer is spliced by the engine, byte for byte. A continuing leg is asked
for with `prompt ids + emitted ids`, read here, and told to the client in the words of the first leg.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from kernel_steer.admission import Answer, LegReport, Node, Outcome, Refusal, Ticket
from kernel_steer.journal import Slot
from kernel_steer.resume.carry import Carrier
from kernel_steer.resume.chunked import Phase
from kernel_steer.resume.classify import ResumeClass
from kernel_steer.resume.joint import CannotComplete
from kernel_steer.resume.leg import ClientLeft, Leg, LegFailed, LegRefused, Mode, open_leg
from kernel_steer.resume.recount import recount
from kernel_steer.resume.sink import ClientGone, CollectSink, StreamSink
from kernel_steer.resume.state import AnswerState, Shape
from kernel_steer.resume.tokens import TokenizerUnavailable
from kernel_steer.resume.work import MOVED, WARMED, Diverged, GiveUp, LegLost, Services, Work

log = logging.getLogger(__name__)


class AnswerRun:
    """Picks nodes and joins their legs; `Carrier` brings each leg to the client."""

    def __init__(
        self, work: Work, ticket: Ticket, sink: StreamSink | CollectSink, slot: Slot, services: Services
    ) -> None:
        self.work = work
        self.ticket = ticket
        self.sink = sink
        self.slot = slot
        self.services = services
        self.limits = services.limits
        self.carrier = Carrier(work, sink, slot, services)
        self.legs: list[LegReport] = []
        self._lost: set[str] = set()
        self._leg_count = 0
        self._current: Leg | None = None
        self._warming: asyncio.Task[None] | None = None
        self._standby: Node | None = None  # chosen and warm
        self._diverged = False  # a replay went another way than the answer
        self._tokenizer_id = ""  # of the last node that was asked
        self._started_at = datetime.now(UTC)

    async def run(self) -> Answer:
        """Tells the answer to the sink. Raises Refusal when nothing was told and nothing can be."""
        try:
            await self._carry_to_the_end()
            outcome = Outcome.COMPLETED
        except (ClientGone, ClientLeft):
            outcome = Outcome.CLIENT_GONE
        except GiveUp as error:
            log.warning("request %s given up: %s", self.work.request_id, error)
            await self._tell_failure(str(error))
            outcome = Outcome.FAILED
        finally:
            self._stop_warming()
        return self.answer(outcome)

    def is_on(self, node: str, epoch: int) -> bool:
        """Whether this incarnation of a node is working on the answer now."""
        leg = self._current
        return leg is not None and (leg.node.name, leg.node.epoch) == (node, epoch)

    def move(self) -> None:
        """The node will be taken away: get a standby ready, then go on there at the next token.

        The standby reads the prompt while the old node still speaks, so the client sees no pause. Only for
        answers that can be continued from ids; the others stay, and are resumed when the node is gone.
        """
        leg = self._current
        if leg is not None and self.work.resume_class is ResumeClass.APPEND and self._warming is None:
            self._warming = asyncio.get_running_loop().create_task(self._warm_standby(leg))

    def answer(self, outcome: Outcome) -> Answer:
        """What was delivered so far, from the journal: the same count that a recovery would make."""
        counted = recount(self.slot.checkpoint, self.slot.uncounted(), choices=self.work.choices)
        return Answer(
            request_id=self.work.request_id,
            record=self.ticket.record,
            outcome=outcome,
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            legs=sorted(self.legs, key=lambda leg: leg.number),
            started_at=self._started_at,
            finished_at=datetime.now(UTC),
        )

    @property
    def state(self) -> AnswerState:
        return self.carrier.state

    # --- legs ---------------------------------------------------------------------------------------

    async def _carry_to_the_end(self) -> None:
        while self.state.finish_reason is None:
            if self._ended_without_saying_so():
                break
            leg = await self._open_next_leg()
            emitted = len(self.state.ids)
            ended = "client_gone"
            self._current = leg
            try:
                await self.carrier.carry(leg)
                ended = "completed"
            except Diverged as lost:
                ended = lost.how
                self._diverged = True
                log.info(
                    "request %s: the replay on %s diverged: %s", self.work.request_id, leg.node.name, lost
                )
            except LegLost as lost:
                ended = lost.how
                self._lost.add(leg.node.name)
                if ended == MOVED:
                    continue
                self.services.admission.node_failed(leg.node.name, leg.node.epoch, f"{lost.how}: {lost}")
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
                self._current = None
                self.services.admission.node_released(leg.node.name, leg.node.epoch)
                self.legs.append(self._report(leg, emitted, ended))
            if self.state.finish_reason is None:
                self._prepare_resume()
        await self._say_the_end()

    def _report(self, leg: Leg, emitted_before: int, ended: str) -> LegReport:
        return LegReport(
            number=leg.number,
            node=leg.node.name,
            prompt_tokens=len(self.state.prompt_ids or ()) + emitted_before,
            completion_tokens=len(self.state.ids) - emitted_before,
            ended=ended,
        )

    def _prepare_resume(self) -> None:
        """Raises GiveUp when no leg can go on with what was said."""
        if not self.sink.streaming and self.work.resume_class is not ResumeClass.APPEND:
            self.carrier.restart()  # nothing was told: the next node answers from the beginning
            self._diverged = False
        if not self.state.ids:
            return  # nothing was said yet: the next leg starts from the same point, whatever the class
        if self.work.resume_class is ResumeClass.NONE:
            raise GiveUp(
                "the node was lost, and this request's parameters do not allow an exact continuation"
            )
        if self._diverged and not self.work.may_append:
            raise GiveUp("the node was lost, and another one did not repeat its answer exactly")
        if self.state.prompt_ids is None:
            raise GiveUp("the node was lost and had not reported its prompt tokens")

    @property
    def _mode(self) -> Mode:
        if not self.state.ids:
            return Mode.FRESH
        if self.work.resume_class is ResumeClass.REPLAY and not self._diverged:
            return Mode.REPLAY
        return Mode.APPEND

    async def _open_next_leg(self) -> Leg:
        started = time.monotonic()
        patience = self.limits.search_s if self.told else self.limits.first_search_s
        while True:
            if sum(leg.ended != WARMED for leg in self.legs) >= self.limits.legs_max:
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
                    raise GiveUp("the standby refused the continuation") from error
                raise Refusal(
                    error.status, error.code or "invalid_request", error.message, param=error.param
                ) from error
            finally:
                if not opened:
                    self.services.admission.node_released(node.name, node.epoch)
            if opened:
                return leg

    async def _warm_standby(self, leaving: Leg) -> None:
        while not self.state.ids:  # noqa: ASYNC110 - in prefill there is nothing to continue from
            await asyncio.sleep(self.limits.poll_s)
        node = self._choose(frozenset({leaving.node.name}))
        if node is None:
            return  # the answer stays as long as its node does
        try:
            self._leg_count += 1
            number, read = self._leg_count, len(self.state.prompt_ids or ()) + len(self.state.ids)
            await self.carrier.warm(await self._ask(node, number, Mode.APPEND, tokens=1))
            self.legs.append(LegReport(number, node.name, read, 1, WARMED))
        except (LegFailed, LegRefused, ClientLeft, LegLost) as error:
            self.services.admission.node_released(node.name, node.epoch)
            log.info("request %s: standby %s is not ready: %s", self.work.request_id, node.name, error)
        except asyncio.CancelledError:
            self.services.admission.node_released(node.name, node.epoch)
            raise
        else:
            self._standby, self.carrier.leave = node, True

    def _stop_warming(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            self._warming = None
        if self._standby is not None:
            self.services.admission.node_released(self._standby.name, self._standby.epoch)
            self._standby = None

    async def _find_node(self, started: float, patience_s: float) -> Node:
        self.carrier.leave = False
        standby, self._standby = self._standby, None
        self._stop_warming()
        if standby is not None:
            return standby
        next_ping = time.monotonic() + self.limits.ping_s
        while True:
            # A node that was lost before is better than none: it may have come back.
            node = self._choose(frozenset(self._lost)) or self._choose()
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

    def _choose(self, exclude: frozenset[str] = frozenset()) -> Node | None:
        return self.services.admission.choose_node(
            self.work.model, exclude=exclude, prefix=self.work.prefix
        )

    async def _open_leg(self, node: Node) -> Leg:
        self._tokenizer_id = node.tokenizer_id
        self._leg_count += 1
        return await self._ask(node, self._leg_count, self._mode)

    async def _ask(self, node: Node, number: int, mode: Mode, *, tokens: int | None = None) -> Leg:
        path, body = self.work.shape.path, self.work.body
        if mode is Mode.APPEND:
            path, body = Shape.COMPLETION.path, self._continuation(tokens)
        if mode is not Mode.FRESH and tokens is None:
            await self._load_tokenizer(node)
        elif node.tokenizer_id and self.work.resume_class is not ResumeClass.NONE:
            self.services.tokenizers.warm(node.tokenizer_id, [_url(node)])
        return await open_leg(
            number=number,
            node=node,
            mode=mode,
            path=path,
            body=body,
            request_id=self.work.request_id,
            timeout_s=self.limits.head_s,
            watch=self.sink.watch,
        )

    def _continuation(self, tokens: int | None) -> dict[str, Any]:
        body = self.work.sampling | {
            "model": self.work.model,
            "prompt": [*(self.state.prompt_ids or ()), *self.state.ids],
            "max_tokens": tokens or self._tokens_left(),
            "stream": True,
            "return_token_ids": True,
        }
        if tokens is None and (min_tokens := self.work.min_tokens - len(self.state.ids)) > 0:
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
        detokenizer = self.services.tokenizers.loaded(self._tokenizer_id)
        if self._tokens_left() <= 0:
            self.state.finish_reason = "length"
        elif detokenizer is not None and detokenizer.is_special(self.state.ids[-1]):
            self.state.finish_reason = "stop"
        return self.state.finish_reason is not None

    async def _load_tokenizer(self, node: Node) -> None:
        try:
            detokenizer = await self.services.tokenizers.get(node.tokenizer_id, [_url(node)])
        except TokenizerUnavailable as error:
            raise LegFailed(str(error)) from error
        self.state.continue_with(detokenizer, self.work.stop, self.work.min_tokens)

    # --- the end ---------------------------------------------------------------------------------------

    async def _say_the_end(self) -> None:
        """Whatever of finish_reason, usage and [DONE] the client has not been told."""
        if not isinstance(self.sink, StreamSink) or self.sink.joint.decoder.phase is Phase.END:
            return
        if not self.state.finish_told:
            text, reason = self.state.flush(), self.state.finish_reason
            await self.sink.event(self.state.chunk(ids=[], text=text, finish_reason=reason))
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
            return GiveUp(message)
        return Refusal(
            503, "no_node", f"{message[0].upper()}{message[1:]}. Try again shortly.", retry_after_s=2
        )


def _url(node: Node) -> str:
    return f"http://{node.host}:{node.port}"
