"""What is known of an answer while it is being given: the same over all its legs."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kernel_steer.detokenize import TextStream
from kernel_steer.engine.base import BadLeg
from kernel_steer.resume.reader import Event
from kernel_steer.resume.tokens import Detokenizer

log = logging.getLogger(__name__)
_NOTHING: dict[str, Any] = {}
_NOT_ENVELOPE = {"choices", "usage", "prompt_token_ids"}


class Shape(StrEnum):
    """The two routes: where they are asked, and how their documents are called."""

    CHAT = "chat"
    COMPLETION = "completion"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Shape.CHAT else "/v1/completions"

    @property
    def document(self) -> str:
        return "chat.completion" if self is Shape.CHAT else "text_completion"


@dataclass(slots=True)
class AnswerState:
    """Ids are the truth; text is derived from them on every leg but the first."""

    shape: Shape = Shape.CHAT
    # Four bytes each: as lists of objects, they would be most of what an answer costs in memory.
    prompt_ids: array[int] | None = None
    ids: array[int] = field(default_factory=lambda: array("I"))
    text: str = ""  # what the client has been told
    envelope: dict[str, Any] = field(default_factory=dict)  # id, object, created, model of leg 1
    finish_reason: str | None = None
    finish_told: bool = False
    usage_told: bool = False
    done_told: bool = False
    _detokenizer: Detokenizer | None = None
    _stream: TextStream | None = None
    _whole: str = ""  # all the text that may be told by now

    def note(self, event: Event) -> None:
        """Takes in an event of a chat leg, whose text is shown as the node sent it."""
        if event.done:
            self.done_told = True
        if event.body is None:
            return
        if not self.envelope:
            self.envelope = {name: value for name, value in event.body.items() if name not in _NOT_ENVELOPE}
        if self.prompt_ids is None and event.prompt_token_ids is not None:
            self.prompt_ids = array("I")
            _extend(self.prompt_ids, event.prompt_token_ids)
        if len(event.choices) == 1:  # the way of nearly all events, and of all that matters for speed
            (choice,) = event.choices
            _extend(self.ids, choice.get("token_ids") or ())
            self.text += choice.get("text") or (choice.get("delta") or _NOTHING).get("content") or ""
            reason = choice.get("finish_reason")
        else:
            _extend(self.ids, event.token_ids)
            self.text += event.text
            reason = event.finish_reason
        if reason:
            self.finish_reason, self.finish_told = reason, True
        self.usage_told = self.usage_told or bool(event.usage and not event.choices)

    def note_words(self, ids: Sequence[int], text: str) -> None:
        """Takes in what a run of such events brings beyond the ones before it: see LegReader.on_words."""
        _extend(self.ids, ids)
        self.text += text

    def continue_with(self, detokenizer: Detokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        """From here on text is made from ids, and stop strings are looked for over the cut, behind the
        first `min_tokens` ids.

        The first delta also brings what the lost node had still held back.
        """
        self._detokenizer = detokenizer
        self._stream = detokenizer.stream(list(self.prompt_ids or ()), stop, min_tokens=min_tokens)
        self._whole = self._stream.push(self.ids)
        if not (self._whole.startswith(self.text) or self.text.startswith(self._whole)):
            log.warning("the node's text is not what its ids decode to")

    def extend(self, ids: Sequence[int]) -> str:
        """Takes in ids of a continuing leg and returns the text the client has not been told yet."""
        assert self._stream is not None
        _extend(self.ids, ids)
        self._whole += self._stream.push(ids)
        return self._tell()

    @property
    def stopped(self) -> bool:
        """A stop string has come, perhaps half from one node and half from another: the answer is over."""
        return self._stream is not None and self._stream.stop_string is not None

    def flush(self) -> str:
        """Text that was held back and is now final: the start of a stop string that did not come, and a
        character that never became whole (U+FFFD)."""
        if self._detokenizer is None or self.stopped:
            return ""
        self._whole = self._detokenizer.decode(list(self.ids))
        return self._tell()

    def _tell(self) -> str:
        delta = self._whole[len(self.text) :]
        self.text += delta
        return delta

    def chunk(
        self, *, ids: Sequence[int], text: str, finish_reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        """An event of the kind that the first leg's were."""
        said: dict[str, Any] = {"text": text}
        if self.shape is Shape.CHAT:
            said = {"delta": {"content": text} if text or finish_reason is None else {}}
        choice = {
            "index": 0,
            "token_ids": list(ids),
            **said,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self.envelope | {"choices": [choice]}

    def document(self) -> dict[str, Any]:
        """The collected answer as one chat.completion or text_completion object."""
        said: dict[str, Any] = {"text": self.text}
        if self.shape is Shape.CHAT:
            said = {"message": {"role": "assistant", "content": self.text}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": self.finish_reason}
        name = {"object": self.shape.document}
        return self.envelope | name | {"choices": [choice], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt_ids or ()), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def usage_chunk(self) -> dict[str, Any]:
        return self.envelope | {"choices": [], "usage": self.usage()}


def _extend(ids: array[int], more: Iterable[int]) -> None:
    """All of them or none. Raises BadLeg."""
    try:
        ids += array("I", more)
    except (TypeError, OverflowError):
        raise BadLeg("token ids that are no numbers of a vocabulary") from None
