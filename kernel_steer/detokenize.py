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
