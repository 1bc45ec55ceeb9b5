"""Reads a run of events that differ in nothing but their token ids and their text, in one go.

So are nearly all events of a stream, and an engine that hands over fifty at a time should not pay for
fifty JSON documents. A `Template` is the rest of such an event, taken from one that was decoded in full. Its
two places are filled by parts of JSON that can stand there (a list of numbers, the inside of a string),
so whatever fits the template decodes to the same document with other ids and other text.

Nothing here decides what is wrong with a stream: what does not fit exactly is left for the long way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import orjson

_IDS = re.compile(rb'"token_ids": ?\[([0-9, ]*)\]')
_WORDS = re.compile(rb'"(?:content|text)": ?"((?:[^"\\]|\\.)*)"')

# What stands between head and tail, with one byte for the middle part and one after each event. Neither
# byte can be part of a valid event.
_MIDDLE, _NEXT = b"\1", b"\2"
_TO_NEXT = bytes.maketrans(_MIDDLE, _NEXT)
_LIST = rb"(?:[0-9]{1,9}+(?:, ?+[0-9]{1,9}+)*+)?+"
_STRING = rb'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrtu])*+'
_IDS_FIRST = re.compile(rb"(?:%b\x01%b\x02)*+" % (_LIST, _STRING))
_WORDS_FIRST = re.compile(rb"(?:%b\x01%b\x02)*+" % (_STRING, _LIST))

# A chunk is the lines `SIZE CR`, `data: {...}`, nothing, `CR`. Its size counts two line feeds.
_LINES = 4
_LAST_LINE = b"\r"
_SIZES = [b"%x\r" % (length + 2) for length in range(1 << 12)]


class Run(NamedTuple):
    """`length` is in raw bytes, chunk framing included."""

    length: int
    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Template:
    """The constant parts of an event's line, around ids and text (in this order or the other)."""

    head: bytes
    middle: bytes
    tail: bytes
    ids_first: bool

    @classmethod
    def of(cls, raw: bytes, body: dict[str, Any]) -> Template | None:
        """From the JSON of one event and what it decodes to; None when its shape is another."""
        ids, words = _IDS.search(raw), _WORDS.search(raw)
        if ids is None or words is None or raw.count(b'"token_ids"') != 1 or "prompt_token_ids" in body:
            return None
        first, second = sorted((ids, words), key=lambda match: match.start())
        head, middle, tail = raw[: first.start(1)], raw[first.end(1) : second.start(1)], raw[second.end(1) :]
        if b"\n" in raw or not _is_same_but_for_ids_and_words(head + middle + tail, body):
            return None
        return cls(b"data: " + head, middle, tail, first is ids)

    def read(self, data: bytes) -> Run | None:
        """The longest run at the start of `data`; None when there is none, or when it is not all valid."""
        lines = data.split(b"\n")
        events = self._leading(lines[1::_LINES][: (len(lines) - 1) // _LINES])
        count = len(events)
        lines = lines[: _LINES * count]
        if not count or lines[2::_LINES] != [b""] * count or lines[3::_LINES] != [_LAST_LINE] * count:
            return None
        inner = [event[len(self.head) : -len(self.tail)] for event in events]
        ids, words = self._fields(inner)
        try:
            if len(ids) != count or lines[::_LINES] != [_SIZES[len(event)] for event in events]:
                return None
            return Run(
                length=sum(map(len, lines)) + len(lines),
                ids=orjson.loads(b"[%b]" % b",".join(filter(None, ids))),
                # Not as one string: then halves of a character would pass that are none in their own events.
                text="".join(orjson.loads(b'["%b"]' % b'","'.join(words))),
            )
        except (orjson.JSONDecodeError, IndexError):
            return None

    def _leading(self, events: list[bytes]) -> list[bytes]:
        """As many of the lines as have the head and the tail."""
        head, tail = self.head, self.tail
        start, end = len(head), -len(tail)
        count = len(events)
        if [line[:start] for line in events] == [head] * count and (
            [line[end:] for line in events] == [tail] * count
        ):
            return events
        return list(takewhile(lambda line: line.startswith(head) and line.endswith(tail), events))

    def _fields(self, inner: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """(ids, words) of each event, in JSON; empty when one of them is anything else."""
        joined = _NEXT.join(inner) + _NEXT
        if _MIDDLE in joined:
            return [], []
        joined = joined.replace(self.middle, _MIDDLE)
        if not (_IDS_FIRST if self.ids_first else _WORDS_FIRST).fullmatch(joined):
            return [], []
        fields = joined.translate(_TO_NEXT).split(_NEXT)
        first, second = fields[:-1:2], fields[1::2]
        return (first, second) if self.ids_first else (second, first)


def _is_same_but_for_ids_and_words(raw: bytes, body: dict[str, Any]) -> bool:
    """Whether the template's two places are those that an event's ids and text are taken from."""
    try:
        emptied = orjson.loads(raw)
        (choice,), (full,) = emptied["choices"], body["choices"]
        words, full_words = (choice, full) if "text" in full else (choice["delta"], full["delta"])
        name = "text" if "text" in full else "content"
        if choice["token_ids"] != [] or words[name] != "" or ("text" in full and "delta" in full):
            return False
        # Whatever else counts, such as a tool call or the usage so far, must be read each time.
        if body.get("usage") or (
            "delta" in full and any(full_words[other] for other in full_words if other != name)
        ):
            return False
        choice["token_ids"], words[name] = full["token_ids"], full_words[name]
    except (KeyError, TypeError, ValueError):
        return False
    return bool(emptied == body)
