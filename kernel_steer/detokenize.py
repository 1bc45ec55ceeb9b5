"""Token ids into text one by one: the node tells it, and the gateway after a resume tells it the same."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class IncrementalDecoder:
    """Gives each character once, when its last id has come. Special tokens are no text.

    `context` are the ids before the first one, such as the end of the prompt: they decide whether it starts
    with a space, and are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(context), skip_special_tokens=True)
        self._undecoded: list[int] = []

    def push(self, token: int) -> str:
        """The text that this id completed, often none."""
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # noqa: BLE001 - the library has no narrower class
            # A stray byte after a character made of bytes: decoding both together would take back the
            # character that was already shown. Start again behind it.
            self._stream = DecodeStream(skip_special_tokens=True)
            pieces = [self._stream.step(self._tokenizer, old) for old in [*self._undecoded, token]]
            text = "".join(piece for piece in pieces if piece) or None
        self._undecoded = [] if text else [*self._undecoded, token]
        return text or ""


class StopStrings:
    """Looks for stop strings in a text that comes in pieces.

    Text is kept back while it may be the start of one. After `found` is set the text is over. `told` is text
    before the first piece, which has been shown: a stop string may begin in it, but not end.
    """

    def __init__(self, stop: Sequence[str] = (), told: str = "") -> None:
        self._stop = stop
        self._reach = max((len(each) for each in stop), default=1) - 1
        self._shown = told[max(0, len(told) - self._reach) :]
        self._held = ""
        self._exempt = len(self._shown)  # of shown and held text: no stop string may end in it
        self.found: str | None = None

    def push(self, text: str, *, exempt: str = "") -> str:
        """The text that may be shown now. `exempt` comes before `text`, and no stop string ends in it."""
        if not self._stop:
            return exempt + text
        before = len(self._shown)
        whole = self._shown + self._held + exempt
        if exempt:
            self._exempt = len(whole)
        whole += text
        end, stop = min(
            (
                (at, stop)
                for stop in self._stop
                if (at := whole.find(stop, max(0, self._exempt - len(stop) + 1))) >= 0
            ),
            default=(-1, None),
        )
        if stop is not None:
            self.found, self._held = stop, ""
            return whole[before:end]
        keep = max(_overlap(whole, stop) for stop in self._stop)
        ready = max(len(whole) - keep, before)
        forgotten = max(0, ready - self._reach)
        self._shown, self._held = whole[forgotten:ready], whole[ready:]
        self._exempt = max(0, self._exempt - forgotten)
        return whole[before:ready]

    def flush(self) -> str:
        """What was kept back for a stop string that never came."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """The text of one answer as its ids arrive.

    Text is kept back while it ends inside a character, or while it may be the start of a stop string.
    After `stop_string` is set the text is over, whatever ids still come. A stop string counts only when it
    ends behind the first `min_tokens` ids, as in vLLM.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        *,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, context)
        self._stops = StopStrings(stop)
        self._unstoppable = min_tokens  # ids still to come that end no stop string

    @property
    def stop_string(self) -> str | None:
        return self._stops.found

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be shown now, often that of `ids`."""
        early = min(self._unstoppable, len(ids))
        self._unstoppable -= early
        exempt = self._decode(ids[:early])
        return self._stops.push(self._decode(ids[early:]), exempt=exempt)

    def _decode(self, ids: Sequence[int]) -> str:
        return "".join(self._decoder.push(token) for token in ids)

    def flush(self) -> str:
        """What was kept back for a stop string that never came. Half a character stays unsaid."""
        return self._stops.flush()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`, the whole of it excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
