"""What the client is told of a leg that is read here: the events of one answer, whatever leg they come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernel_steer.detokenize import StopStrings
from kernel_steer.resume import logprobs
from kernel_steer.resume.leg import Leg, Mode
from kernel_steer.resume.reader import Event
from kernel_steer.resume.said import CONTENT, Contradiction, Piece, Replayed, pieces_of
from kernel_steer.resume.state import AnswerState, Shape
from kernel_steer.resume.work import Diverged, LegLost, Work

# Of a chunk; all but `model`.
_OPENAI_FIELDS = ("id", "object", "created", "system_fingerprint", "choices", "usage")


class Teller:
    """One per leg. `over`: the answer has ended here, whatever the node still says."""

    def __init__(self, work: Work, state: AnswerState, leg: Leg) -> None:
        self._work = work
        self._state = state
        # A replay of an answer of which nothing is known any more is its beginning.
        self._mode = Mode.FRESH if leg.mode is Mode.REPLAY and not state.begun else leg.mode
        self._told_before = bool(state.envelope)
        self._prompt_checked = False
        self._uncounted_before = state.uncounted
        self._replayed = Replayed(state.ids, state.text, state.strands)
        self._foreign = leg.node.upstream is not None
        self._stops = StopStrings(work.stop if leg.mode is Mode.TEXT else (), told=state.text)
        self.continues = self._told_before
        self.over = False

    @staticmethod
    def tokens_of(event: Event) -> int:
        """As many as the node has brought, new to the client or not; without ids an event is one."""
        return len(event.token_ids) or bool(event.choices and pieces_of(event.choices[0]))

    def take(self, event: Event) -> dict[str, Any] | None:
        """Adds the event to the state and returns what the client is told of it; None when that is nothing.

        Usage and [DONE] are said over all legs, elsewhere. Raises LegLost or Diverged.
        """
        if event.body is None or not event.choices:
            self._note_usage(event)
            return None
        if self._foreign:
            event = self._in_our_words(event)
        self._check_prompt(event)
        match self._mode:
            case Mode.FRESH:
                told = self._first(event)
            case Mode.APPEND:
                told = self._rest_by_ids(event)
            case Mode.REPLAY:
                told = self._rest_of_replay(event)
            case Mode.TEXT:
                told = self._rest_by_text(event)
        return told

    def _in_our_words(self, event: Event) -> Event:
        """Under the name that the client asked for, without what a third party adds about itself (its price, its
        own suppliers)."""
        assert event.body is not None
        body = {name: event.body[name] for name in _OPENAI_FIELDS if name in event.body}
        return replace(event, body=body | {"model": self._work.model})

    def _first(self, event: Event) -> dict[str, Any] | None:
        state, choice = self._state, event.choices[0]
        said = event.token_ids or pieces_of(choice) or choice.get("finish_reason")
        if self._told_before and not said:
            return None  # the role is said once
        state.note(event)
        self._count_without_ids(event)
        assert event.body is not None
        return state.envelope | {name: v for name, v in event.body.items() if name not in state.envelope}

    def _rest_by_ids(self, event: Event) -> dict[str, Any] | None:
        """Text made from all ids of the answer, and never the node's own: see state.continue_with."""
        state, choice, ids = self._state, event.choices[0], event.token_ids
        if not ids and not choice.get("finish_reason"):
            return None
        reason = choice.get("finish_reason")
        silent_last = reason == "stop" and bool(ids) and ids[-1] in self._work.stop_token_ids
        text = state.extend(ids, silent_last=silent_last)
        reason = "stop" if state.stopped else reason
        self.over = state.stopped
        if reason:
            text += state.flush()
        said = choice.get("logprobs")
        if said and self._work.shape is Shape.CHAT and "tokens" in said:
            said = logprobs.as_chat(said, self._work.logprobs or 0)
        elif said:
            said = said | {"text_offset": state.offsets(ids)}
        return self._told(ids, [(CONTENT, text)] if text else [], reason, said)

    def _rest_of_replay(self, event: Event) -> dict[str, Any] | None:
        choice, reason = event.choices[0], event.finish_reason
        try:
            ids = self._replayed.new_ids(event.token_ids)
            pieces = self._replayed.new_pieces(pieces_of(choice))
            if reason:
                self._replayed.end()
        except Contradiction as error:
            raise Diverged(str(error)) from error
        if not (ids or pieces or reason):
            return None
        self._state.take_ids(ids)
        self._state.take(pieces)
        return self._told(ids, pieces, reason, logprobs.last(choice.get("logprobs"), len(ids)))

    def _rest_by_text(self, event: Event) -> dict[str, Any] | None:
        state, choice = self._state, event.choices[0]
        pieces: list[Piece] = []
        for strand, text in pieces_of(choice):
            shown = self._stops.push(text) if strand == CONTENT else text
            pieces += [(strand, shown)] if shown else []
        self.over = self._stops.found is not None
        reason = "stop" if self.over else choice.get("finish_reason")
        if reason and (held := self._stops.flush()):
            pieces.append((CONTENT, held))
        self._count_without_ids(event)
        if not (pieces or reason):
            return None
        state.take(pieces)
        return self._told([], pieces, reason, choice.get("logprobs"))

    def _told(
        self, ids: list[int], pieces: list[Piece], reason: str | None, said: dict[str, Any] | None
    ) -> dict[str, Any]:
        state = self._state
        if reason:
            state.finish_reason, state.finish_told = reason, True
        state.keep(said)
        return state.chunk(ids=ids, pieces=pieces, finish_reason=reason, logprobs=said)

    # --- checks and counts ----------------------------------------------------------------------------

    def _check_prompt(self, event: Event) -> None:
        """The node must have read exactly what it was given; otherwise its words are not this answer's."""
        told, state = event.prompt_token_ids, self._state
        if told is None or state.prompt_ids is None or self._prompt_checked:
            return
        self._prompt_checked = True
        if self._mode is Mode.APPEND and len(told) != len(state.prompt_ids) + len(state.ids):
            raise LegLost("bad", "the standby read another prompt than it was given")
        if self._mode is Mode.REPLAY and told != list(state.prompt_ids):
            raise Diverged("another prompt than the first node's")

    def _count_without_ids(self, event: Event) -> None:
        if self._state.prompt_ids is None and not event.token_ids and self.tokens_of(event):
            self._state.uncounted += 1

    def _note_usage(self, event: Event) -> None:
        """A server without ids says at its end how many tokens there were."""
        state, usage = self._state, event.usage
        if state.prompt_ids is not None or not usage:
            return
        state.uncounted = self._uncounted_before + int(usage.get("completion_tokens") or 0)
        if self._mode is Mode.FRESH:
            state.prompt_tokens_said = int(usage.get("prompt_tokens") or 0)
