"""HTTP/1.1 chunked framing, decoded with the exact state at every byte.

A library's parser gives the payload but not where in the framing a cut stream stopped, and that is
what a resume must know to complete the client's chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from kernel_steer.engine.base import BadLeg

_HEX = frozenset(b"0123456789abcdefABCDEF")
_SIZE_DIGITS_MAX = 8


class Phase(IntEnum):
    SIZE = 0  # in the hexadecimal size, or just before it
    EXTENSION = 1  # after the size, up to CR
    SIZE_LF = 2
    DATA = 3  # `rest` bytes of the chunk to come (0: its CR is next)
    DATA_LF = 4
    TRAILER = 5  # after the zero chunk, up to the empty line
    END = 6


@dataclass(slots=True)
class Piece:
    """Payload, or with `payload` empty: a chunk (or the whole body) just ended at `end`."""

    payload: bytes
    end: int  # position in the raw body after this piece


@dataclass(slots=True)
class ChunkedDecoder:
    phase: Phase = Phase.SIZE
    rest: int = 0
    digits: bytes = b""
    position: int = 0  # raw bytes consumed
    _trailer: bytes = b""

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Yields payload pieces and chunk ends in order. Raises BadLeg on anything that is not chunked."""
        index, length = 0, len(data)
        while index < length:
            if self.phase is Phase.DATA and self.rest:
                taken = min(self.rest, length - index)
                self.rest -= taken
                self.position += taken
                yield Piece(data[index : index + taken], self.position)
                index += taken
                continue
            byte = data[index]
            index += 1
            self.position += 1
            if self._step(byte):
                yield Piece(b"", self.position)

    def _step(self, byte: int) -> bool:
        """One byte of framing; True when it ends a chunk or the body."""
        match self.phase:
            case Phase.SIZE:
                if byte in _HEX and len(self.digits) < _SIZE_DIGITS_MAX:
                    self.digits += bytes([byte])
                elif byte in b"\r; \t" and self.digits:
                    self.phase = Phase.SIZE_LF if byte == 13 else Phase.EXTENSION
                else:
                    raise BadLeg("malformed chunk size")
            case Phase.EXTENSION:
                if byte == 13:
                    self.phase = Phase.SIZE_LF
            case Phase.SIZE_LF:
                self._expect(byte, 10)
                self.rest = int(self.digits, 16)
                self.digits = b""
                self.phase = Phase.DATA if self.rest else Phase.TRAILER
            case Phase.DATA:
                self._expect(byte, 13)
                self.phase = Phase.DATA_LF
            case Phase.DATA_LF:
                self._expect(byte, 10)
                self.phase = Phase.SIZE
                return True
            case Phase.TRAILER:
                self._trailer += bytes([byte])
                if self._trailer.endswith(b"\r\n\r\n") or self._trailer == b"\r\n":
                    self.phase = Phase.END
                    return True
                if len(self._trailer) > 8192:
                    raise BadLeg("endless trailer")
            case Phase.END:
                raise BadLeg("bytes after the end of the answer")
        return False

    @staticmethod
    def _expect(byte: int, wanted: int) -> None:
        if byte != wanted:
            raise BadLeg("malformed chunk framing")

    @property
    def chunk_rest(self) -> int:
        """As Checkpoint.chunk_rest: bytes of the current chunk to come, -1 between two chunks."""
        return self.rest if self.phase is Phase.DATA else -1

    @property
    def ending(self) -> bool:
        """In or after the zero chunk: no payload can follow any more."""
        zero_size = self.phase in (Phase.SIZE_LF, Phase.EXTENSION) and int(self.digits, 16) == 0
        return zero_size or self.phase in (Phase.TRAILER, Phase.END)

    def rest_of_end(self) -> bytes:
        """What is missing of the zero chunk once `ending`."""
        match self.phase:
            case Phase.END:
                return b""
            case Phase.TRAILER:
                return b"\n" if self._trailer.endswith(b"\r\n\r") or self._trailer == b"\r" else b"\r\n"
            case Phase.SIZE_LF:
                return b"\n\r\n"
            case _:
                return b"\r\n\r\n"

    @classmethod
    def resume(cls, *, position: int, chunk_rest: int) -> ChunkedDecoder:
        """A decoder as it was at a checkpoint."""
        if chunk_rest < 0:
            return cls(position=position)
        return cls(phase=Phase.DATA, rest=chunk_rest, position=position)


def encode_chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = b"0\r\n\r\n"
