"""One choice of an answer from first leg to last word, whatever happens to the nodes.

    pick a node -> open a leg -> carry it -> complete? done : fence, continue on another node

The first leg of a streamed answer is spliced by the engine, byte for byte. What comes after it is read here,
and told to the client in the words of the first leg.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from kernel_steer.admission import LegReport, Node, Refusal, Resume, Ticket
from kernel_steer.resume.ask import question
from kernel_steer.resume.carry import Carrier, Counted
from kernel_steer.resume.classify import ResumeClass
from kernel_steer.resume.leg import Leg, LegFailed, LegRefused, Mode, open_leg
from kernel_steer.resume.said import CONTENT
from kernel_steer.resume.sink import ClientGone, Sink
from kernel_steer.resume.standby import Standby
from kernel_steer.resume.state import AnswerState
from kernel_steer.resume.tokens import Detokenizer, TokenizerUnavailable
from kernel_steer.resume.work import MOVED, Diverged, GiveUp, LegLost, Services, Work

log = logging.getLogger(__name__)


class LegBook:
    """The legs of a request, over all its choices."""

    def __init__(self) -> None:
        self.reports: list[LegReport] = []
        self._numbers = 0

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers


class ChoiceRun:
    """Picks nodes and joins their legs; `Carrier` brings each leg to the client."""

    def __init__(
        self, work: Work, ticket: Ticket, sink: Sink, slot: Counted, services: Services, book: LegBook
    ) -> None:
        self.work = work
        self.sink = sink
        self.services = services
        self.limits = services.limits
        self.carrier = Carrier(work, sink, slot, services)
        self.book = book
        self.current: Leg | None = None
        self.diverged = False  # a replay went another way than the answer
        self._ticket = ticket
        self._standby = Standby(self)
        self._lost: set[str] = set()
        self._legs = self._deaths = 0
        self._left: Node | None = None  # where the latest leg was
        self._lost_to = ""  # the node whose going made the next leg necessary
        self._discarded = 0  # tokens of legs whose words nobody was told

    @property
    def state(self) -> AnswerState:
        return self.carrier.state

    async def run(self) -> None:
        """Returns when the client has been told the finish_reason. Raises GiveUp, ClientGone, ClientLeft,
        and Refusal when nothing was told and nothing can be."""
        try:
            while self.state.finish_reason is None and not await self._ended_without_saying_so():
                await self._carry(await self._open_next_leg())
                if self.state.finish_reason is None:
                    self._prepare_resume()
        finally:
            self._standby.stop()
            if any(str(strand[0]).startswith("reasoning") for strand in self.state.strands):
                self.services.reasoning_models.add(self.work.model)
        if self.sink.streaming and not self.state.finish_told:
            text, reason = self.state.flush(), self.state.finish_reason
            pieces = [(CONTENT, text)] if text else []
            await self.sink.event(self.state.chunk(ids=[], pieces=pieces, finish_reason=reason))
            self.state.finish_told = True

    def is_on(self, node: str, epoch: int) -> bool:
        """Whether this incarnation of a node is working on the choice now."""
        leg = self.current
        return leg is not None and (leg.node.name, leg.node.epoch) == (node, epoch)

    def move(self) -> None:
        """The node will be taken away: go on elsewhere before it is. See Standby."""
        self._standby.prepare()

    # --- one leg --------------------------------------------------------------------------------------

    async def _carry(self, leg: Leg) -> None:
        before, lost_to = self.state.completion_tokens, self._lost_to
        ended = "client_gone"
        self.current = leg
        try:
            await self.carrier.carry(leg)
            ended = "completed"
        except LegLost as lost:
            ended = lost.how
            self._judge(leg, lost)
        finally:
            leg.sock.close()
            self.current, self._left = None, leg.node
            self._legs += 1
            self.release(leg.node)
            self.book.reports.append(
                LegReport(
                    number=leg.number,
                    node=leg.node.name,
                    prompt_tokens=self.state.prompt_tokens + (before if leg.mode is Mode.APPEND else 0),
                    completion_tokens=self.state.completion_tokens - before,
                    ended=ended,
                    # Whether it reads the answer so far (append) or generates it again (replay).
                    repeated_tokens=self.state.prompt_tokens + before + self._discarded if lost_to else 0,
                    lost_to=lost_to,
                )
            )

    def _judge(self, leg: Leg, lost: LegLost) -> None:
        request, node = self.work.request_id, leg.node.name
        if isinstance(lost, Diverged):
            self.diverged = True
            log.info("request %s: the replay on %s diverged: %s", request, node, lost)
            return
        self._lost_to = node
        if lost.how == MOVED:
            self._lost.add(node)
            return
        self._deaths += not self.carrier.spoke
        self.blame(leg.node, f"{lost.how}: {lost}")
        log.info("request %s: leg %d on %s ended: %s (%s)", request, leg.number, node, lost.how, lost)

    def blame(self, node: Node, reason: str, *, unreachable: bool = False) -> None:
        """This request keeps off the node; everybody does when it is not the request's own doing."""
        self._lost.add(node.name)
        if self.services.circuits.failed(node.name, node.epoch, self.work.customer, unreachable=unreachable):
            self.services.admission.node_failed(node.name, node.epoch, reason)

    def _prepare_resume(self) -> None:
        """Raises GiveUp when no leg can go on with what was said."""
        assert self._left is not None
        by_ids = self._left.resume is Resume.IDS and self.state.prompt_ids is not None
        if not self.sink.streaming and (self._replays or self.diverged or not by_ids):
            self._discarded = self.state.completion_tokens
            self.carrier.restart()  # nothing was told: the next node answers from the beginning
            self.diverged = False
        state, work = self.state, self.work
        if not state.begun:
            return  # nothing was said yet: the next leg starts from the same point, whatever the class
        if self._left.resume is Resume.NONE or (self._left.resume is Resume.TEXT and not self._fits_text):
            raise GiveUp("the node was lost, and what it had begun cannot be continued by another one")
        if self.diverged and not (work.may_append and not state.strands):
            raise GiveUp("the node was lost, and another one did not repeat its answer exactly")
        if self._left.resume is Resume.IDS and not by_ids:
            raise GiveUp("the node was lost and had not reported its prompt tokens")

    @property
    def _replays(self) -> bool:
        """Parsers that have begun to cut an answer up cannot be started in its middle."""
        return (
            self.work.resume_class is ResumeClass.REPLAY or bool(self.state.strands) or self._something_hides
        )

    @property
    def _something_hides(self) -> bool:
        """There should be text by now, and the client has seen none: a parser nobody declared may hold it."""
        state = self.state
        if state.text or self.work.stop or self._left is None:
            return False
        detokenizer = self.services.tokenizers.loaded(self._left.tokenizer_id)
        return detokenizer is not None and bool(detokenizer.decode(list(state.ids)).strip("\ufffd"))

    @property
    def _fits_text(self) -> bool:
        return self.work.may_append and not self.state.strands

    def mode_for(self, node: Node) -> Mode | None:
        """How this node can go on with the answer; None: not at all."""
        if not self.state.begun:
            return Mode.FRESH
        if self.state.prompt_ids is None:
            return Mode.TEXT if node.resume is Resume.TEXT else None
        if node.resume is not Resume.IDS:
            return None
        return Mode.REPLAY if self._replays and not self.diverged else Mode.APPEND

    # --- finding a node -------------------------------------------------------------------------------

    async def _open_next_leg(self) -> Leg:
        if (leg := self._standby.take_leg()) is not None:
            return leg
        started = time.monotonic()
        patience_s = self.limits.search_s if self.sink.begun else self.limits.first_search_s
        refused = set[str]()
        while True:
            if self._legs >= self.limits.legs_max or self._deaths >= self.limits.deaths_max:
                raise self._failure("too many nodes were lost during this answer")
            if self.sink.begun and time.monotonic() - started > self.limits.resume_s:
                raise self._failure("no node took up this answer in time")
            node = await self._find_node(started, patience_s)
            opened = False
            try:
                leg = await self._open_leg(node)
                opened = True
                return leg
            except LegFailed as error:
                log.info("request %s: node %s took no leg: %s", self.work.request_id, node.name, error)
                self._lost.add(node.name)
                self._hold_against(node, error)
                if time.monotonic() - started > patience_s:
                    raise self._failure("no node is available to serve this model") from error
                again = node.name in refused
                refused.add(node.name)
            except LegRefused as error:
                raise self._refusal(error) from error
            finally:
                if not opened:
                    self.release(node)
            if again:  # there is no other one
                await self.carrier.keep_alive(self.limits.ping_s)
                await asyncio.sleep(self.limits.retry_s)

    def _hold_against(self, node: Node, error: LegFailed) -> None:
        if error.misconfigured:
            self.services.admission.node_misconfigured(node.name, node.epoch, str(error))
        elif not error.blameless:
            self.blame(node, str(error), unreachable=error.unreachable)
        if error.retry_after_s is not None:
            self.services.circuits.rest(node.name, node.epoch, error.retry_after_s)

    async def _find_node(self, started: float, patience_s: float) -> Node:
        """Raises GiveUp or Refusal when there is none for so long."""
        self.carrier.leave = False
        standby = self._standby.take_node()
        if standby is not None:
            return standby
        while True:
            # One that was lost before, or has an open circuit, is better than none: it may have come back.
            node = self._choose(self._lost, fussy=True) or self._choose(set(), fussy=False)
            if node is not None:
                return node
            if self.sink.watch.gone:
                raise ClientGone
            if time.monotonic() - started > patience_s:
                raise self._failure("no node is available to serve this model")
            await self.carrier.keep_alive(self.limits.ping_s)
            await asyncio.sleep(self.limits.poll_s)

    def choose_beside(self, leaving: Node) -> Node | None:
        """A standby for the answer that is on `leaving`."""
        return self._choose(self._lost | {leaving.name}, fussy=True)

    def _choose(self, avoid: set[str], *, fussy: bool) -> Node | None:
        circuits, refused = self.services.circuits, set[str]()
        while True:
            node = self.services.admission.choose_node(
                self.work.model, exclude=frozenset(avoid | refused), prefix=self.work.prefix
            )
            if node is None:
                return None
            closed = fussy and circuits.closed_to(node.name, node.epoch)
            if self.mode_for(node) and not closed and not circuits.resting(node.name, node.epoch):
                circuits.begin(node.name, node.epoch)
                return node
            self.services.admission.node_released(node.name, node.epoch)
            if node.name in refused:
                return None
            refused.add(node.name)

    def release(self, node: Node) -> None:
        self.services.circuits.ended(node.name, node.epoch)
        self.services.admission.node_released(node.name, node.epoch)

    # --- asking it ------------------------------------------------------------------------------------

    async def _open_leg(self, node: Node) -> Leg:
        mode = self.mode_for(node)
        assert mode is not None
        if mode is Mode.APPEND:
            await self._load_tokenizer(node)
        elif node.tokenizer_id:
            self.services.tokenizers.warm(node.tokenizer_id, [_url(node)])
        return await self._with_signs_of_life(node, self.ask(node, mode))

    async def ask(self, node: Node, mode: Mode, *, tokens: int | None = None) -> Leg:
        """`tokens`: as many and no more. Raises LegFailed, LegRefused or ClientLeft."""
        path, body = question(self.work, self.state, node, mode, tokens_left=tokens or self._tokens_left())
        opener = open_leg if node.upstream is None else self.services.upstreams.open_leg
        return await opener(
            number=self.book.next_number(),
            node=node,
            mode=mode,
            path=path,
            body=body,
            request_id=self.work.request_id,
            timeout_s=self.limits.resume_s if self.state.begun else self.limits.head_s,
            watch=self.sink.watch,
        )

    async def _with_signs_of_life(self, node: Node, opening: Coroutine[Any, Any, Leg]) -> Leg:
        """While a node reads a long prompt the client hears pings; from the first on, errors are events."""
        every_s = self.limits.ping_s if self.state.begun else self.limits.keep_alive_s
        task = asyncio.ensure_future(opening)
        try:
            while not (await asyncio.wait({task}, timeout=self.carrier.quiet_left_s(every_s)))[0]:
                await self.sink.begin(node.name)
                await self.carrier.keep_alive(every_s)
        except BaseException:
            task.cancel()
            if (await asyncio.wait({task}))[0] and not task.cancelled() and task.exception() is None:
                task.result().sock.close()
            raise
        return task.result()

    async def _load_tokenizer(self, node: Node) -> None:
        try:
            detokenizer = await self.services.tokenizers.get(node.tokenizer_id, [_url(node)])
        except TokenizerUnavailable as error:
            raise LegFailed(str(error), blameless=True) from error
        self._decode_from_ids(detokenizer)

    def _decode_from_ids(self, detokenizer: Detokenizer) -> None:
        work = self.work
        self.state.continue_with(
            detokenizer, work.stop, min_tokens=work.min_tokens, silent=work.stop_token_ids
        )

    # --- the end --------------------------------------------------------------------------------------

    def _tokens_left(self) -> int:
        used = self.state.completion_tokens
        room = self._ticket.model.context_tokens - self.state.prompt_tokens - used
        wanted = self.work.completion_tokens_max
        return room if wanted is None else min(room, wanted - used)

    async def _ended_without_saying_so(self) -> bool:
        """The last token was delivered and only the words "it is finished" were lost with the node."""
        state, work = self.state, self.work
        if not state.begun or self._standby.has_leg:
            return False
        if state.strands or not work.may_append:
            # What the parser or the grammar still held back is not to be had from ids: only a replay tells.
            return False
        at_limit = self._tokens_left() <= 0
        detokenizer = await self._tokenizer_of_left(wanted=at_limit)
        if detokenizer is not None and state.ids:
            self._decode_from_ids(detokenizer)
        ends = detokenizer is not None and not work.ignore_eos and detokenizer.ends_text
        if state.stopped or (
            state.ids and (state.ids[-1] in work.stop_token_ids or (ends and ends(state.ids[-1])))
        ):
            state.finish_reason = "stop"
        elif at_limit:
            state.finish_reason = "length"
        return state.finish_reason is not None

    async def _tokenizer_of_left(self, *, wanted: bool) -> Detokenizer | None:
        """Of the node that was lost, which may be gone with it; `wanted` enough to ask it all the same."""
        assert self._left is not None
        tokenizer_id = self._left.tokenizer_id
        if (loaded := self.services.tokenizers.loaded(tokenizer_id)) is not None or not wanted:
            return loaded
        try:
            return await self.services.tokenizers.get(tokenizer_id, [_url(self._left)])
        except TokenizerUnavailable:
            log.info("request %s: no tokenizer to look at the end with", self.work.request_id)
            return None

    def _refusal(self, error: LegRefused) -> Exception:
        """The node calls the request itself wrong; it is not to blame for that."""
        if self.state.begun:
            return GiveUp("the standby refused the continuation")
        code = error.code or "invalid_request"
        if self.sink.begun:
            return GiveUp(error.message, kind="invalid_request_error", code=code)
        return Refusal(error.status, code, error.message, param=error.param)

    def _failure(self, message: str) -> Exception:
        if self.sink.begun:
            return GiveUp(message)
        return Refusal(
            503, "no_node", f"{message[0].upper()}{message[1:]}. Try again shortly.", retry_after_s=2
        )


def _url(node: Node) -> str:
    return f"http://{node.host}:{node.port}"
