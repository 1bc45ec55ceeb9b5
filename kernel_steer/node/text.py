"""Ids into text, piece by piece: whole characters only, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from kernel_steer.detokenize import IncrementalDecoder


class TextStream:
    """The text of one answer as its ids arrive.

    Text is kept back while it ends inside a character, or while it may be the start of a stop string.
    After `stop_string` is set the text is over, whatever ids still come.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stop = stop
        self._decoder = IncrementalDecoder(tokenizer)
        self._held = ""
        self.stop_string: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be shown now, often that of `ids`."""
        text = self._held + "".join(self._decoder.push(token) for token in ids)
        end, stop = min(
            ((at, stop) for stop in self._stop if (at := text.find(stop)) >= 0), default=(-1, None)
        )
        if stop is not None:
            self.stop_string, self._held = stop, ""
            return text[:end]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was kept back for a stop string that never came. Half a character stays unsaid."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`, the whole of it excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
