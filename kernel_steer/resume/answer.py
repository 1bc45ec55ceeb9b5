"""One answer: its choices, what is charged for it, and what is said at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kernel_steer.admission import Answer, Outcome, Ticket
from kernel_steer.journal import Slot
from kernel_steer.resume.choice import ChoiceRun, LegBook
from kernel_steer.resume.chorus import ChoiceSink, ChoiceSlot, Chorus
from kernel_steer.resume.chunked import Phase
from kernel_steer.resume.joint import CannotComplete
from kernel_steer.resume.leg import ClientLeft
from kernel_steer.resume.recount import recount
from kernel_steer.resume.sink import ClientGone, CollectSink, StreamSink
from kernel_steer.resume.work import GiveUp, Services, Work

log = logging.getLogger(__name__)


class AnswerRun:
    """Tells an answer to the sink."""

    def __init__(
        self, work: Work, ticket: Ticket, sink: StreamSink | CollectSink, slot: Slot, services: Services
    ) -> None:
        self.work = work
        self.ticket = ticket
        self.sink = sink
        self.slot = slot
        self._book = LegBook()
        self._started_at = datetime.now(UTC)
        self.choices: Sequence[ChoiceRun]
        self._chorus: Chorus | None = None
        if work.choices == 1:
            self.choices = [ChoiceRun(work, ticket, sink, slot, services, self._book)]
        else:
            chorus = self._chorus = Chorus(sink, slot, work.choices)
            self.choices = [
                ChoiceRun(
                    _choice_of(work, index),
                    ticket,
                    ChoiceSink(chorus, index),
                    ChoiceSlot(chorus, index),
                    services,
                    self._book,
                )
                for index in range(work.choices)
            ]

    async def run(self) -> Answer:
        """Raises Refusal when nothing was told and nothing can be."""
        try:
            await self._run_choices()
            await self._say_the_end()
            outcome = Outcome.COMPLETED
        except (ClientGone, ClientLeft):
            outcome = Outcome.CLIENT_GONE
        except GiveUp as error:
            log.warning("request %s given up: %s", self.work.request_id, error)
            await self._tell_failure(error)
            outcome = Outcome.FAILED
        return self.answer(outcome)

    async def _run_choices(self) -> None:
        """The first failure of one is the answer's: a client cannot use half of its choices."""
        if len(self.choices) == 1:
            await self.choices[0].run()
            return
        tasks = [asyncio.ensure_future(choice.run()) for choice in self.choices]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    def answer(self, outcome: Outcome) -> Answer:
        """What was delivered so far, from the journal: the same count that a recovery would make."""
        counted = recount(self.slot.checkpoint, self.slot.uncounted())
        return Answer(
            request_id=self.work.request_id,
            record=self.ticket.record,
            outcome=outcome,
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            legs=sorted(self._book.reports, key=lambda leg: leg.number),
            started_at=self._started_at,
            finished_at=datetime.now(UTC),
        )

    def document(self) -> dict[str, Any]:
        """The collected answer as one chat.completion or text_completion object."""
        first = self.choices[0].state
        usage = first.usage()
        usage["completion_tokens"] = sum(choice.state.completion_tokens for choice in self.choices)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        choices = [choice.state.choice(index) for index, choice in enumerate(self.choices)]
        return first.envelope | {"object": self.work.shape.document, "choices": choices, "usage": usage}

    def save_told(self) -> None:
        """The document has reached the client."""
        for choice in self.choices:
            choice.carrier.save_told()

    @property
    def told(self) -> bool:
        """Something of this answer has been said, so that an HTTP error is no longer possible."""
        return self.sink.begun

    # --- the end ---------------------------------------------------------------------------------------

    async def _say_the_end(self) -> None:
        """Whatever of usage and [DONE] the client has not been told."""
        if not isinstance(self.sink, StreamSink) or self.sink.joint.decoder.phase is Phase.END:
            return
        state = self.choices[0].state
        if self._chorus is not None:
            envelope, usage = state.envelope | self._chorus.envelope, self._chorus.usage()
        else:
            envelope, usage = state.envelope, state.usage()
        if self.work.include_usage and not state.usage_told:
            await self.sink.event(envelope | {"choices": [], "usage": usage})
        await self.sink.finish(done=state.done_told)

    async def _tell_failure(self, failure: GiveUp) -> None:
        if not isinstance(self.sink, StreamSink):
            return
        try:
            await self.sink.error(failure.error)
        except (ClientGone, CannotComplete):
            log.info("request %s: the client could not be told", self.work.request_id)


def _choice_of(work: Work, index: int) -> Work:
    """Choice `index` as a request of its own. Its seed is the one that vLLM would give it."""
    return replace(work, choices=1, body=_seeded(work.body, index), sampling=_seeded(work.sampling, index))


def _seeded(body: dict[str, Any], index: int) -> dict[str, Any]:
    return body | {"seed": body["seed"] + index} if "seed" in body else body
