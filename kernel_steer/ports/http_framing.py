"""Where HTTP/1.1 messages begin and end, in the same few states as the program in the kernel.

A framer never changes a byte. It says how many of the bytes that came belong to the message, and when
the message is over. Its state is two numbers, so a connection can go from the kernel to user space and
back at any segment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

HEAD_BYTES_MAX = 64 * 1024
CHUNK_MAX = 1 << 40
_LINE_MAX = 4096  # of a chunk's extensions, or one trailer


class Phase(IntEnum):
    """What the next byte of a message is. Those up to TUNNEL are also the kernel's."""

    BOUNDARY = 0  # the first byte of a head
    COUNTED = 1  # one of `left` bytes of the body
    CHUNK_SIZE = 2  # the first digit of a chunk's size
    SIZE_MORE = 3  # another one, or CR; `left` is the size so far
    SIZE_LF = 4
    CHUNK_DATA = 5  # one of `left` bytes
    DATA_CR = 6
    DATA_LF = 7
    LAST_CR = 8  # after the chunk of size 0: CR, or the first byte of a trailer
    LAST_LF = 9
    TUNNEL = 10  # no HTTP any more, both directions
    EXTENSION = 11  # of a chunk
    TRAILER = 12
    UNTIL_CLOSE = 13  # the end of the connection ends the body


class BadMessage(Exception):
    """Bytes that cannot be framed without doubt; the message says what is wrong."""


@dataclass(slots=True)
class Framer:
    """Follows one message's body."""

    phase: Phase = Phase.BOUNDARY
    left: int = 0

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.BOUNDARY

    def feed(self, data: bytes | memoryview) -> int:
        """How many of the bytes belong to the message. Raises BadMessage."""
        at, end = 0, len(data)
        while at < end and not self.is_over:
            match self.phase:
                case Phase.TUNNEL | Phase.UNTIL_CLOSE:
                    at = end
                case Phase.COUNTED | Phase.CHUNK_DATA:
                    taken = min(self.left, end - at)
                    at += taken
                    self.left -= taken
                    if not self.left:
                        self.phase = Phase.BOUNDARY if self.phase is Phase.COUNTED else Phase.DATA_CR
                case _:
                    self._step(data[at])
                    at += 1
        return at

    def _step(self, byte: int) -> None:
        match self.phase:
            case Phase.CHUNK_SIZE | Phase.SIZE_MORE:
                self._size(byte)
            case Phase.SIZE_LF:
                self._expect(byte, b"\n", Phase.CHUNK_DATA if self.left else Phase.LAST_CR)
            case Phase.DATA_CR:
                self._expect(byte, b"\r", Phase.DATA_LF)
            case Phase.DATA_LF:
                self._expect(byte, b"\n", Phase.CHUNK_SIZE)
            case Phase.LAST_CR:
                if byte == 13:
                    self.phase = Phase.LAST_LF
                else:
                    self.phase, self.left = Phase.TRAILER, 0
            case Phase.LAST_LF:
                self._expect(byte, b"\n", Phase.BOUNDARY)
            case Phase.EXTENSION:
                # Only CR LF ends it: a lone LF is read differently by different servers.
                if byte == 10:
                    raise BadMessage("line feed without carriage return in a chunk's size")
                if byte == 13:
                    self.phase = Phase.SIZE_LF
            case _:
                self._trailer(byte)

    def _size(self, byte: int) -> None:
        digit = _HEXADECIMAL.get(byte)
        if digit is not None:
            self.left = self.left * 16 + digit
            if self.left > CHUNK_MAX:
                raise BadMessage("chunk that is too large")
            self.phase = Phase.SIZE_MORE
        elif self.phase is Phase.SIZE_MORE and byte == 13:
            self.phase = Phase.SIZE_LF
        elif self.phase is Phase.SIZE_MORE and byte in b"; \t":
            self.phase = Phase.EXTENSION
        else:
            raise BadMessage("chunk without a size")

    def _trailer(self, byte: int) -> None:
        self.left += 1
        if self.left > _LINE_MAX:
            raise BadMessage("trailer that is too long")
        if byte == 10:
            self.phase = Phase.LAST_CR

    def _expect(self, byte: int, wanted: bytes, then: Phase) -> None:
        if byte != wanted[0]:
            raise BadMessage("chunk that does not end where it should")
        self.phase = then


_HEXADECIMAL = {ord(digit): int(digit, 16) for digit in "0123456789abcdefABCDEF"}

# --- heads ----------------------------------------------------------------------------------------------

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) [^ \x00-\x1f\x7f]+ HTTP/1\.([01])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\x00]*?)[ \t]*\r\n")
_SAFE = {b"GET", b"HEAD"}


@dataclass(frozen=True, slots=True)
class RequestHead:
    method: bytes
    length: int  # of the head
    body: Framer  # at its first byte
    keep_alive: bool

    @property
    def may_be_sent_twice(self) -> bool:
        """Without a body and without effect: the head is all of it."""
        return self.method in _SAFE and self.body.is_over


@dataclass(frozen=True, slots=True)
class ResponseHead:
    status: int
    length: int
    body: Framer
    keep_alive: bool

    @property
    def is_interim(self) -> bool:
        return 100 <= self.status < 200 and self.status != 101


def read_request_head(data: bytes) -> RequestHead | None:
    """None while it is incomplete. Raises BadMessage."""
    found = _split(data, _REQUEST_LINE)
    if found is None:
        return None
    line, fields, length = found
    keep_alive = _keeps_alive(line[2], fields)
    return RequestHead(line[1], length, _announced(fields) or Framer(), keep_alive)


def read_response_head(data: bytes, method: bytes) -> ResponseHead | None:
    """`method` is the request's. None while it is incomplete. Raises BadMessage."""
    found = _split(data, _STATUS_LINE)
    if found is None:
        return None
    line, fields, length = found
    status = int(line[2])
    keep_alive = _keeps_alive(line[1], fields)
    if status == 101 or (method == b"CONNECT" and 200 <= status < 300):
        return ResponseHead(status, length, Framer(Phase.TUNNEL), keep_alive)
    if status < 200 or status in (204, 304) or method == b"HEAD":
        return ResponseHead(status, length, Framer(), keep_alive)
    body = _announced(fields) or Framer(Phase.UNTIL_CLOSE)
    return ResponseHead(status, length, body, keep_alive and body.phase is not Phase.UNTIL_CLOSE)


def _split(
    data: bytes, first_line: re.Pattern[bytes]
) -> tuple[re.Match[bytes], dict[bytes, bytes], int] | None:
    end = data.find(b"\r\n\r\n")
    if end < 0 and len(data) <= HEAD_BYTES_MAX:
        return None
    if not 0 <= end <= HEAD_BYTES_MAX:
        raise BadMessage(f"head over {HEAD_BYTES_MAX} bytes")
    line = first_line.match(data)
    if line is None:
        raise BadMessage("first line that is not HTTP/1.1")
    fields: dict[bytes, bytes] = {}
    at = line.end()
    while at < end + 2:
        found = _FIELD.match(data, at, end + 2)
        if found is None:
            raise BadMessage("header line that is malformed")
        name = found[1].lower()
        if name in fields and name in (b"content-length", b"transfer-encoding"):
            raise BadMessage(f"{name.decode()} that is given twice")
        fields[name] = fields[name] + b"," + found[2] if name in fields else found[2]
        at = found.end()
    return line, fields, end + 4


def _announced(fields: dict[bytes, bytes]) -> Framer | None:
    encoding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
    if encoding is not None:
        if length is not None:
            raise BadMessage("Content-Length together with Transfer-Encoding")
        if encoding.lower() != b"chunked":
            raise BadMessage("Transfer-Encoding other than chunked")
        return Framer(Phase.CHUNK_SIZE)
    if length is None:
        return None
    if not (length.isdigit() and len(length) < 12):
        raise BadMessage("Content-Length that is no number of bytes")
    return Framer(Phase.COUNTED, int(length)) if int(length) else Framer()


def _keeps_alive(minor: bytes, fields: dict[bytes, bytes]) -> bool:
    options = {option.strip().lower() for option in fields.get(b"connection", b"").split(b",")}
    return b"close" not in options if minor == b"1" else b"keep-alive" in options
