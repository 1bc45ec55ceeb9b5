"""Completes, byte for byte, what a dead leg left half-said to the client.

The client of a cut stream may be in the middle of an HTTP chunk and of an event. The first words of
the next leg are shaped so that both come out whole: the chunk gets exactly the bytes it announced,
and the event parses to what the next leg says, as if nothing had been cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from kernel_steer.engine.base import BadLeg
from kernel_steer.resume.chunked import LAST_CHUNK, ChunkedDecoder, Phase, encode_chunk
from kernel_steer.resume.reader import Event, parse_event


def encode_event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


DONE_EVENT = b"data: [DONE]\n\n"
PING_EVENT = b": ping\n\n"


class CannotComplete(ValueError):
    """No bytes can make sense of what the client has begun to read; its connection must be cut."""


@dataclass(slots=True)
class Joint:
    """The client's side of the cut: where it is in the framing, and which event it has begun.

    Made from what was *delivered*, which is not always what was read.
    """

    decoder: ChunkedDecoder
    begun: bytes = b""  # payload of the event that the client has begun to read
    _closing: bytes = b""  # the blank line that a whole event still lacks

    @classmethod
    def after(cls, *, decoder: ChunkedDecoder, delivered_since: bytes) -> Joint:
        """`decoder` stood at an event boundary; the client got `delivered_since` from there on."""
        payload = b"".join(piece.payload for piece in decoder.feed(delivered_since))
        ends = list(re.finditer(rb"\r\n\r\n|\n\n|\r\r", payload))
        return cls(decoder, payload[ends[-1].end() :] if ends else payload)

    def take_whole_event(self) -> Event | None:
        """The begun event when only its blank line is missing: it is as good as told."""
        try:
            event = parse_event(self.begun)
        except BadLeg:
            return None
        if event.body is None and not event.done:
            return None
        self._closing = b"\n" if self.begun.endswith(b"\n") else b"\n\n"
        self.begun = b""
        return event

    @property
    def mid_event(self) -> bool:
        return bool(self.begun)

    def event(self, body: dict[str, Any]) -> bytes:
        """Payload that makes the client read `body` as its next event."""
        if not self.begun:
            return encode_event(body)
        begun, self.begun = self.begun, b""
        return complete_event(begun, body)

    def done_event(self) -> bytes:
        """Payload of `[DONE]`, after which no event follows."""
        begun, self.begun = self.begun, b""
        if not DONE_EVENT.startswith(begun):
            raise CannotComplete("the client has begun to read another event than the last one")
        return DONE_EVENT[len(begun) :]

    def frame(self, payload: bytes) -> bytes:
        """Chunked framing for payload, the open chunk filled first. Returns raw bytes for the client."""
        out, payload, self._closing = b"", self._closing + payload, b""
        decoder = self.decoder
        if decoder.ending:
            raise CannotComplete("the client has been told that the body ends here")
        if decoder.phase is Phase.SIZE and not decoder.digits:
            return encode_chunk(payload) if payload else b""
        if decoder.phase in (Phase.SIZE, Phase.EXTENSION, Phase.SIZE_LF):
            out += self._finish_size()
        if decoder.phase is Phase.DATA and decoder.rest:
            taken = payload[: decoder.rest]
            out, payload = out + taken, payload[len(taken) :]
            decoder.rest -= len(taken)
            if decoder.rest:
                return out
        if decoder.phase is Phase.DATA:
            out += b"\r\n"
        elif decoder.phase is Phase.DATA_LF:
            out += b"\n"
        decoder.phase = Phase.SIZE
        return out + (encode_chunk(payload) if payload else b"")

    def _finish_size(self) -> bytes:
        """A half-sent size stands; it only must not say zero, which would end the body."""
        decoder = self.decoder
        out = b""
        if decoder.phase is Phase.SIZE:
            if int(decoder.digits, 16) == 0:
                out += b"40"
                decoder.digits += b"40"
            out += b"\r"
        elif decoder.phase is Phase.EXTENSION:
            out += b"\r"
        decoder.rest = int(decoder.digits, 16)
        decoder.digits = b""
        decoder.phase = Phase.DATA
        return out + b"\n"

    def last_chunk(self) -> bytes:
        """Ends the body. A chunk that was announced longer is filled with blank lines, which mean nothing."""
        decoder = self.decoder
        out = b""
        if decoder.ending:
            return decoder.rest_of_end()
        if self._closing or decoder.phase is not Phase.SIZE or decoder.digits:
            out = self.frame(b"")
            while decoder.phase is Phase.DATA and decoder.rest:
                out += self.frame(b"\n" * decoder.rest)
        return out + LAST_CHUNK


def complete_event(begun: bytes, body: dict[str, Any]) -> bytes:
    """What must follow `begun`, the start of an event, so that the event's JSON means `body`.

    When the natural encoding of `body` starts with `begun`, its rest. Otherwise the JSON that was
    begun is closed validly and every member is said again: JSON parsers keep the last of two equal
    names, so what was half-said has no effect. Raises CannotComplete.
    """
    whole = encode_event(body)
    if whole.startswith(begun):
        return whole[len(begun) :]
    prefix = re.match(rb"data: ?", begun)
    if prefix is None or prefix.end() == len(begun):
        # A piece of the field name, or a comment: end that line as it must be ended.
        for field in (b"data: ", b"data:"):
            if field.startswith(begun):
                return field[len(begun) :] + orjson.dumps(body) + b"\n\n"
        return (b"\n" if begun.endswith((b"\n", b"\r")) else b"\n\n") + whole
    text = begun[prefix.end() :]
    if not text.lstrip().startswith(b"{"):
        raise CannotComplete("the client has begun to read something that is no JSON object")
    closing, empty = close_object(text)
    members = orjson.dumps(body)[1:-1]
    return closing + (b"" if empty or not members else b",") + members + b"}\n\n"


def close_object(text: bytes) -> tuple[bytes, bool]:
    """Bytes that bring a begun JSON object back to its top level, open for more members.

    Returns them and whether the object has no member yet. `text` starts with `{`; it may stop
    anywhere, also inside a name, an escape, a number or a UTF-8 character.
    """
    stack: list[str] = []
    state = "value"  # what may come next: value, name, colon, comma
    in_string = escape = False
    unicode_digits = 0
    literal = b""
    string_is_name = False
    members = 0
    for byte in text:
        char = chr(byte)
        if in_string:
            if unicode_digits:
                unicode_digits -= 1
            elif escape:
                escape = False
                unicode_digits = 4 if char == "u" else 0
            elif char == "\\":
                escape = True
            elif char == '"':
                in_string = False
                state = "colon" if string_is_name else "comma"
            continue
        if literal and char in ",]} \t\r\n":
            literal, state = b"", "comma"
        if char in " \t\r\n":
            continue
        if char == '"':
            in_string, string_is_name = True, state == "name" and stack[-1] == "{"
            if string_is_name and len(stack) == 1:
                members += 1
        elif char in "{[":
            stack.append(char)
            state = "name" if char == "{" else "value"
        elif char in "}]":
            stack.pop()
            state = "comma"
        elif char == ":":
            state = "value"
        elif char == ",":
            state = "name" if stack[-1] == "{" else "value"
        else:
            literal += bytes([byte])
    closing = b""
    after_comma = text.rstrip()[-1:] == b","
    if in_string:
        closing += _close_string(text, escape, unicode_digits)
        state = "colon" if string_is_name else "comma"
    elif literal:
        closing += _close_literal(literal)
        state = "comma"
    if state == "colon":
        closing += b":null"
    elif (state == "value" and text.rstrip()[-1:] == b":") or (after_comma and state == "value"):
        closing += b"null"
    elif after_comma and state == "name" and len(stack) > 1:
        closing += b'"":null'
    for opener in reversed(stack[1:]):
        closing += b"}" if opener == "{" else b"]"
    open_for_member = members == 0 or (after_comma and state == "name" and len(stack) == 1)
    return closing, open_for_member


_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def _close_escape(text: bytes, escape: bool, unicode_digits: int) -> bytes:
    """Finishes a cut escape; a high surrogate gets a low one, without it the JSON is refused."""
    if escape:
        return b"udc00" if _HIGH_SURROGATE.search(text[:-1]) else b"\\"
    closing = b""
    if unicode_digits:
        digits = 4 - unicode_digits
        paired = _HIGH_SURROGATE.search(text[: len(text) - digits - 2])
        closing = b"dc00"[digits:] if paired else b"0" * unicode_digits
        if paired:
            return closing
    return closing + (b"\\udc00" if _HIGH_SURROGATE.search(text + closing) else b"")


def _close_string(text: bytes, escape: bool, unicode_digits: int) -> bytes:
    closing = _close_escape(text, escape, unicode_digits)
    tail = text[-3:]
    for back in range(1, min(3, len(tail)) + 1):
        lead = tail[-back]
        if lead >= 0xC0:  # a character was cut: continue it with its lowest bytes
            need = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            missing = need - back
            if missing > 0:
                low = (
                    b"\xa0"
                    if lead == 0xE0 and back == 1
                    else b"\x90"
                    if lead == 0xF0 and back == 1
                    else b"\x80"
                )
                closing = (low + b"\x80" * (missing - 1)) + closing
            break
        if lead < 0x80:
            break
    return closing + b'"'


def _close_literal(literal: bytes) -> bytes:
    for word in (b"true", b"false", b"null"):
        if word.startswith(literal):
            return word[len(literal) :]
    return b"0" if literal[-1:] in b"-+.eE" else b""
