"""Understands the body of one leg: chunk framing, server-sent events, token ids, how it ended.

A `LegReader` is the gate of its flow. Only whole events that are fit for the client pass: an error
event, `finish_reason: "abort"` and a `[DONE]` that nothing justified are a node's last words, not
the answer's end (vLLM stopped by SIGTERM says all three and closes cleanly).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from kernel_steer.engine.base import BadLeg
from kernel_steer.resume.chunked import ChunkedDecoder, Phase
from kernel_steer.resume.uniform import Template

# The only reasons that complete an answer. Clean EOF, [DONE], "abort" and "error" prove nothing.
COMPLETE_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_EVENT_BYTES_MAX = 1 << 20
# A chunk with one event, as nodes send them: SIZE \r\n data: {...} \n\n \r\n
_PLAIN_START, _PLAIN_END = b"\r\ndata: ", b"\n\n\r\n"
_PLAIN_AROUND = len(b"data: ") + len(b"\n\n")


def _plain_body(chunk: bytes) -> dict[str, Any] | None:
    """What one chunk (without _PLAIN_END) says: one event, one choice, not the last. None for all else."""
    size, _, text = chunk.partition(_PLAIN_START)
    if not text.startswith(b"{") or not _is_size(size, len(text) + _PLAIN_AROUND):
        return None
    try:
        body: dict[str, Any] = orjson.loads(text)
        (choice,) = body["choices"]
        plain = choice["finish_reason"] is None and "error" not in body and not body.get("usage")
        return body if plain else None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


def _is_size(digits: bytes, length: int) -> bool:
    """Whether a chunk's size line says just this. Short, so that nothing but digits can be meant."""
    return digits.lower() == b"%x" % length


@dataclass(slots=True)
class Event:
    """One complete event. `body` is None for `[DONE]` and for comments."""

    body: dict[str, Any] | None
    done: bool = False
    raw: bytes = b""

    @property
    def choices(self) -> list[dict[str, Any]]:
        return (self.body or {}).get("choices") or []

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """On the first chunk: at the top in a chat stream, inside the choice in a completions stream."""
        body = self.body or {}
        found = body.get("prompt_token_ids")
        if found is None and self.choices:
            found = self.choices[0].get("prompt_token_ids")
        return found

    @property
    def token_ids(self) -> list[int]:
        """New ids of all choices."""
        return [token for choice in self.choices for token in choice.get("token_ids") or ()]

    @property
    def text(self) -> str:
        """New text of the first choice, of a chat or of a completions stream."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return choice.get("text") or (choice.get("delta") or {}).get("content") or ""

    @property
    def finish_reason(self) -> str | None:
        return next((c["finish_reason"] for c in self.choices if c.get("finish_reason")), None)

    @property
    def usage(self) -> dict[str, Any] | None:
        return (self.body or {}).get("usage")


def parse_event(raw: bytes) -> Event:
    """One event without its blank line. Raises BadLeg for what is no answer of a working node."""
    data = b"\n".join(
        line[5:].removeprefix(b" ") for line in re.split(rb"\r\n|\n|\r", raw) if line.startswith(b"data:")
    )
    if not data:
        return Event(None, raw=raw)
    if data.strip() == b"[DONE]":
        return Event(None, done=True, raw=raw)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadLeg("an event that is not JSON") from error
    if not isinstance(body, dict):
        raise BadLeg("an event that is no JSON object")
    if body.get("error"):
        raise BadLeg("the node reported an error in its answer")
    return Event(body, raw=raw)


@dataclass(slots=True)
class LegReader:
    """Feed it raw body bytes in order; it calls `on_event` for each event that may be shown.

    Runs of events that bring nothing but ids and text are told to `on_words` instead, where it is given.
    """

    on_event: Callable[[Event], None]
    decoder: ChunkedDecoder = field(default_factory=ChunkedDecoder)
    on_words: Callable[[Sequence[int], str], None] | None = None
    safe: int = 0  # raw position up to which the client may see the body
    safe_chunk_rest: int = -1  # as Checkpoint.chunk_rest, at `safe`
    finished: int = 0
    done: bool = False
    bad: BadLeg | None = None
    _partial: bytes = b""
    _tokens_said: int = 0  # by the running usage, where there is one
    _template: Template | None = None

    @property
    def complete(self) -> bool:
        """It ended with a reason that counts."""
        return self.finished > 0

    def feed(self, data: bytes) -> int:
        """Returns the new `safe`. Never raises for a bad leg: what came before it is still good; see `bad`."""
        if self.bad is None:
            try:
                if self._is_between_plain_chunks():
                    data = self._feed_plain(self._feed_uniform(data))
                if data:
                    self._feed(data)
            except BadLeg as error:
                self.bad = error
        return self.safe

    def _is_between_plain_chunks(self) -> bool:
        decoder = self.decoder
        return not self._partial and decoder.phase is Phase.SIZE and not decoder.digits

    def _feed_uniform(self, data: bytes) -> bytes:
        """The shortest way: many events at once that are all like one of them. Returns what is left."""
        if self.on_words is None:
            return data
        data = self._feed_run(data, self.on_words)
        chunk, _, rest = data.partition(_PLAIN_END)
        body = _plain_body(chunk) if _PLAIN_END in rest else None
        if body is None:
            return data  # for a single event nothing would be won
        self.on_event(Event(body))
        self._skip(len(chunk) + len(_PLAIN_END))
        self._template = Template.of(chunk.partition(_PLAIN_START)[2], body)
        return self._feed_run(rest, self.on_words)

    def _feed_run(self, data: bytes, on_words: Callable[[Sequence[int], str], None]) -> bytes:
        run = self._template.read(data) if self._template is not None else None
        if run is None:
            return data
        on_words(run.ids, run.text)
        self._skip(run.length)
        return data[run.length :]

    def _feed_plain(self, data: bytes) -> bytes:
        """The short way for what nearly all of a stream is. Returns what is left for the long way."""
        used = 0
        for chunk in data.split(_PLAIN_END)[:-1]:
            body = _plain_body(chunk)
            if body is None:
                break
            self.on_event(Event(body))
            length = len(chunk) + len(_PLAIN_END)
            self._skip(length)
            used += length
        return data[used:]

    def _skip(self, length: int) -> None:
        """Whole chunks with whole events were read past the decoder."""
        self.decoder.position += length
        self.safe, self.safe_chunk_rest = self.decoder.position, -1

    def _feed(self, data: bytes) -> None:
        for piece in self.decoder.feed(data):
            if piece.payload:
                self._take(piece.payload, piece.end)
            elif not self._partial and not (
                self.decoder.phase is Phase.END and not (self.done and self.complete)
            ):
                self.safe, self.safe_chunk_rest = piece.end, -1
        if len(self._partial) > _EVENT_BYTES_MAX:
            raise BadLeg("an event without end")

    def _take(self, payload: bytes, raw_end: int) -> None:
        buffer, start = self._partial + payload, 0
        for match in _EVENT_END.finditer(buffer):
            event = parse_event(buffer[start : match.start()])
            start = match.end()
            self._judge(event)
            self.on_event(event)
            after = len(buffer) - start
            self.safe, self.safe_chunk_rest = raw_end - after, self.decoder.rest + after
        self._partial = buffer[start:]

    def _judge(self, event: Event) -> None:
        self._check_running_usage(event)
        for choice in event.choices:
            if reason := choice.get("finish_reason"):
                if reason not in COMPLETE_REASONS:
                    raise BadLeg(f"the node gave up with finish_reason {reason!r}")
                self.finished += 1
        if event.done:
            if not self.complete:
                raise BadLeg("[DONE] without a finish_reason")
            self.done = True

    def _check_running_usage(self, event: Event) -> None:
        """SGLang, made to stop, says its last token once more; the usage so far shows that it is no new one."""
        if not event.token_ids or not event.usage:
            return
        said = event.usage.get("completion_tokens") or 0
        if said <= self._tokens_said:
            raise BadLeg("the node said its last token twice")
        self._tokens_said = said
