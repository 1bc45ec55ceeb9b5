"""What is known of one choice of an answer while it is being given: the same over all its legs."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kernel_steer.detokenize import TextStream
from kernel_steer.engine.base import BadLeg
from kernel_steer.resume import logprobs
from kernel_steer.resume.reader import Event
from kernel_steer.resume.said import CONTENT, Piece, Strand, delta_of, extend, message_of, pieces_of
from kernel_steer.resume.tokens import Detokenizer

log = logging.getLogger(__name__)
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
    """Ids are the truth; on a leg that continues from ids, text is derived from them."""

    shape: Shape = Shape.CHAT
    keep_logprobs: bool = False  # for a document; a stream shows them and forgets
    usage_in_every_chunk: bool = False
    # Four bytes each: as lists of objects, they would be most of what an answer costs in memory.
    prompt_ids: array[int] | None = None
    ids: array[int] = field(default_factory=lambda: array("I"))
    text: str = ""  # content that the client has been told
    strands: dict[Strand, str] = field(default_factory=dict)  # and what parsers made of the rest
    envelope: dict[str, Any] = field(default_factory=dict)  # id, object, created, model of leg 1
    finish_reason: str | None = None
    finish_told: bool = False
    usage_told: bool = False
    done_told: bool = False
    uncounted: int = 0  # tokens of a server without ids: one per event, until it says how many they were
    prompt_tokens_said: int = 0  # by such a server
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    _characters: TextStream | None = None  # the same without stop strings, to count
    _offset: int = 0
    _stream: TextStream | None = None
    _whole: str = ""  # all the text that may be told by now

    @property
    def begun(self) -> bool:
        """Something of the answer itself was told: it can only be gone on with."""
        return bool(self.ids or self.text or self.strands or self.uncounted)

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_tokens_said if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        return len(self.ids) + self.uncounted

    def note(self, event: Event) -> None:
        """Takes in an event of a leg whose words are shown as the node sent them."""
        if event.done:
            self.done_told = True
        if event.body is None:
            return
        if not self.envelope:
            self.envelope = {name: value for name, value in event.body.items() if name not in _NOT_ENVELOPE}
        if self.prompt_ids is None and event.prompt_token_ids is not None:
            self.prompt_ids = array("I")
            _extend(self.prompt_ids, event.prompt_token_ids)
        if not event.choices:
            self.usage_told = self.usage_told or bool(event.usage)
            return
        choice = event.choices[0]
        _extend(self.ids, choice.get("token_ids") or ())
        delta = choice.get("delta")
        if delta is None:
            self.text += choice.get("text") or ""
        elif len(delta) == 1 and "content" in delta:  # nearly all events, and all that matters for speed
            self.text += delta["content"] or ""
        else:
            self.take(pieces_of(choice))
        self.keep(choice.get("logprobs"))
        if reason := choice.get("finish_reason"):
            self.finish_reason, self.finish_told = reason, True

    def note_words(self, ids: Sequence[int], text: str) -> None:
        """Takes in what a run of such events brings beyond the ones before it: see LegReader.on_words."""
        self.take_ids(ids)
        self.text += text

    def take_ids(self, ids: Sequence[int]) -> None:
        _extend(self.ids, ids)

    def take(self, pieces: Sequence[Piece]) -> None:
        for strand, text in pieces:
            if strand == CONTENT:
                self.text += text
            else:
                extend(self.strands, strand, text)

    def keep(self, said: dict[str, Any] | None) -> None:
        if said and self.keep_logprobs:
            self._logprobs.append(said)

    # --- text from ids -------------------------------------------------------------------------------

    def continue_with(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        silent: Sequence[int] = (),
    ) -> None:
        """From here on text is made from ids, and stop strings are looked for over the cut.

        The first delta also brings what the lost node had still held back. A last id among `silent` has no text.
        """
        context, ids = list(self.prompt_ids or ()), list(self.ids)
        if ids and ids[-1] in silent:
            ids.pop()
        self._stream = detokenizer.stream(context, stop, min_tokens=min_tokens)
        self._whole = self._stream.push(ids)
        self._characters = detokenizer.stream(context)
        self._offset = len(self._characters.push(ids))
        if not (self._whole.startswith(self.text) or self.text.startswith(self._whole)):
            log.warning("the node's text is not what its ids decode to")

    def extend(self, ids: Sequence[int], *, silent_last: bool = False) -> str:
        """Takes in ids of a continuing leg and returns the text the client has not been told yet."""
        assert self._stream is not None
        self.take_ids(ids)
        self._whole += self._stream.push(ids[:-1] if silent_last else ids)
        return self._tell()

    def offsets(self, ids: Sequence[int]) -> list[int]:
        """Where in the answer's text the next ids begin, in characters. Once per id of a continuing leg."""
        assert self._characters is not None
        starts = []
        for token in ids:
            starts.append(self._offset)
            self._offset += len(self._characters.push([token]))
        return starts

    @property
    def stopped(self) -> bool:
        """A stop string has come, perhaps half from one node and half from another: the answer is over."""
        return self._stream is not None and self._stream.stop_string is not None

    def flush(self) -> str:
        """Text that was held back and is now final: the start of a stop string that did not come. Half a
        character stays unsaid, as with an engine."""
        if self._stream is None:
            return ""
        self._whole += self._stream.flush()
        return self._tell()

    def _tell(self) -> str:
        delta = self._whole[len(self.text) :]
        self.text += delta
        return delta

    # --- in the words of the first leg ---------------------------------------------------------------

    def chunk(
        self,
        *,
        ids: Sequence[int],
        pieces: Sequence[Piece],
        finish_reason: str | None = None,
        logprobs: Any = None,
    ) -> dict[str, Any]:
        """An event of the kind that the first leg's were."""
        said: dict[str, Any] = {"text": "".join(text for _, text in pieces)}
        if self.shape is Shape.CHAT:
            said = {"delta": delta_of(pieces) or ({} if finish_reason else {"content": ""})}
        # The ids before the text: who has a piece of the text of a cut event has its ids.
        numbered = {} if self.prompt_ids is None else {"token_ids": list(ids)}
        ends = {"logprobs": logprobs, "finish_reason": finish_reason}
        choice = {"index": 0, **numbered, **said, **ends}
        usage = {"usage": self.usage()} if self.usage_in_every_chunk else {}
        return self.envelope | {"choices": [choice]} | usage

    def choice(self, index: int) -> dict[str, Any]:
        """The collected choice, as it stands in a document."""
        said: dict[str, Any] = {"text": self.text}
        if self.shape is Shape.CHAT:
            said = {"message": message_of(self.text, self.strands)}
        probabilities = logprobs.joined(self._logprobs)
        return {"index": index, **said, "logprobs": probabilities, "finish_reason": self.finish_reason}

    def usage(self) -> dict[str, int]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _extend(ids: array[int], more: Iterable[int]) -> None:
    """All of them or none. Raises BadLeg."""
    try:
        ids += array("I", more)
    except (TypeError, OverflowError):
        raise BadLeg("token ids that are no numbers of a vocabulary") from None
