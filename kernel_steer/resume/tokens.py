"""Token ids to text, the same on every node: the gateway detokenises a resumed answer itself.

Text of two legs must never be joined as text: a character that spans the cut comes out broken on
both sides. Ids joined and decoded once are exact.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import tokenizers

from kernel_steer.detokenize import TextStream

# The prompt's tail decides whether the first token starts with a space.
_CONTEXT_TOKENS = 16
_END_MARK = re.compile(
    r"eos|eot|eom|im_end|end.?of.?(text|turn|sentence|message)|</s>|<\|(end|return|call)\|>", re.IGNORECASE
)


class TokenizerUnavailable(RuntimeError):
    """No node of the pool could give the tokenizer; without it an answer cannot be resumed."""


class Detokenizer:
    """One per tokenizer.json."""

    def __init__(self, raw: bytes) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        self._ends = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and _END_MARK.search(token.content)
        )

    def stream(
        self, prompt_ids: Sequence[int], stop: Sequence[str] = (), *, min_tokens: int = 0
    ) -> TextStream:
        return TextStream(self._tokenizer, stop, prompt_ids[-_CONTEXT_TOKENS:], min_tokens=min_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """All of it at once; an incomplete character at the end becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def ends_text(self, token_id: int) -> bool:
        """Ends of texts and turns, as models call them: one of them as last id means the answer had ended.

        Not every special token does: some models open their reasoning or a tool call with one.
        """
        return token_id in self._ends


class TokenizerStore:
    """Tokenizers by the sha256 of their file: fetched once from a node, kept on disk, loaded once."""

    def __init__(self, folder: Path, shelf: Callable[[str], Awaitable[bytes | None]] | None = None) -> None:
        self._folder = folder
        self._shelf = shelf  # for those that no node hands out: kernel_steer/tokenizer_shelf.py
        self._loading: dict[str, asyncio.Future[Detokenizer]] = {}

    async def get(self, tokenizer_id: str, sources: Sequence[str]) -> Detokenizer:
        """`sources` are base URLs of nodes that have it. Raises TokenizerUnavailable."""
        if not tokenizer_id:
            raise TokenizerUnavailable("the node declares no tokenizer")
        return await asyncio.shield(self.warm(tokenizer_id, sources))

    def warm(self, tokenizer_id: str, sources: Sequence[str]) -> asyncio.Future[Detokenizer]:
        """Starts to load it, so that it is there when a node is lost. Failures are tried again by `get`."""
        loading = self._loading.get(tokenizer_id)
        if loading is None or (loading.done() and loading.exception() is not None):
            loading = asyncio.ensure_future(self._load(tokenizer_id, list(sources)))
            loading.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._loading[tokenizer_id] = loading
        return loading

    def loaded(self, tokenizer_id: str) -> Detokenizer | None:
        """The tokenizer when it is there already."""
        loading = self._loading.get(tokenizer_id)
        usable = (
            loading is not None and loading.done() and not loading.cancelled() and loading.exception() is None
        )
        return loading.result() if loading is not None and usable else None

    async def _load(self, tokenizer_id: str, sources: Sequence[str]) -> Detokenizer:
        path = self._folder / f"{tokenizer_id}.json"
        raw = await asyncio.to_thread(_read_verified, path, tokenizer_id)
        if raw is None:
            raw = await self._fetch(tokenizer_id, sources)
            await asyncio.to_thread(_write, path, raw)
        return await asyncio.to_thread(Detokenizer, raw)

    async def _fetch(self, tokenizer_id: str, sources: Sequence[str]) -> bytes:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30, connect=2)) as session:
            for base in sources:
                try:
                    async with session.get(f"{base}/tokenizer.json") as response:
                        raw = await response.read()
                except (aiohttp.ClientError, TimeoutError):
                    continue
                if hashlib.sha256(raw).hexdigest() == tokenizer_id:
                    return raw
        if self._shelf is not None and (shelved := await self._shelf(tokenizer_id)) is not None:
            return shelved
        raise TokenizerUnavailable("no node could give the tokenizer of this model")


def _read_verified(path: Path, tokenizer_id: str) -> bytes | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    return raw if hashlib.sha256(raw).hexdigest() == tokenizer_id else None


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{id(raw)}.part")
    unfinished.write_bytes(raw)
    unfinished.replace(path)
