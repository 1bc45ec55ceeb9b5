"""What was delivered, kept where a `kill -9` of the gateway does not reach it.

A file of fixed slots, mapped into memory: the kernel keeps the pages when the process dies, and the
next start reads them. One slot per answer in work. A slot holds

    header      state and the checkpoint (which leg, how far it was counted, how many tokens)
    record      JSON that `Admission.settle` needs, written once
    ring        the newest bytes of the leg that is being forwarded

Bytes go into the ring *before* they go to the client. The counting runs behind: the checkpoint says
how many tokens there were up to `counted`; what lies between `counted` and `delivered` is still in
the ring and is counted at recovery. A machine crash may lose the file's last seconds: then the hold
of the answer expires and nothing is charged.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = 0x41504A31  # "APJ1": change it with the layout
_FILE_HEADER = struct.Struct("<III")  # magic, slots, slot size
_HEADER_BYTES = 4096
_RECORD_OFFSET = 256
_RECORD_MAX = _HEADER_BYTES - _RECORD_OFFSET
RING_BYTES = 65536
_SLOT_BYTES = _HEADER_BYTES + RING_BYTES

_STATE = struct.Struct("<I")
_SELECTOR = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_AT_STATE, _AT_SELECTOR, _AT_WRITTEN, _AT_DELIVERED, _AT_RECORD_LENGTH = 0, 4, 8, 16, 24
_CHECKPOINT = struct.Struct("<QIIIII")
_AT_CHECKPOINT = (64, 128)
# 192..215: the kernel engine's note of the ring that has the newest bytes (engine/kernel/recovery.py).

FREE, OPEN = 0, 1


class JournalFull(RuntimeError):
    """Every slot is in use: the gateway works on as many answers as it may."""


class JournalTaken(RuntimeError):
    """Another living gateway has the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All of it changes at once. `counted` is a byte position in the body of leg `leg`.

    There, an event has just ended, and `chunk_rest` bytes of the HTTP chunk around it were still to
    come (-1: between two chunks). Token counts are sums over all legs.
    """

    leg: int = 1
    counted: int = 0
    chunk_rest: int = -1
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finished: bool = False


class Left(NamedTuple):
    """An answer that a dead gateway left behind."""

    slot: Slot
    record: dict[str, Any] | None
    checkpoint: Checkpoint
    tail: bytes  # delivered, not yet counted


class Slot:
    """Space for one answer. Not shared between threads."""

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        self._memory = memory
        self.number = number
        self._base = _HEADER_BYTES + number * _SLOT_BYTES
        self._ring = self._base + _HEADER_BYTES
        self.checkpoint = Checkpoint()
        self.written = 0
        self.delivered = 0

    def _clear(self) -> None:
        """Back to an empty slot; the state goes last, so that a half-cleared one is never taken for OPEN."""
        self._memory[self._base + _AT_SELECTOR : self._base + _RECORD_OFFSET] = bytes(
            _RECORD_OFFSET - _AT_SELECTOR
        )
        self.written = self.delivered = 0
        self._write_checkpoint(Checkpoint())

    def write_record(self, record: dict[str, Any]) -> None:
        """Keeps what settling needs. Raises ValueError when it is over the limit."""
        raw = json.dumps(record, separators=(",", ":")).encode()
        if len(raw) > _RECORD_MAX:
            raise ValueError(f"journal record of {len(raw)} bytes, at most {_RECORD_MAX} fit")
        start = self._base + _RECORD_OFFSET
        self._memory[start : start + len(raw)] = raw
        _STATE.pack_into(self._memory, self._base + _AT_RECORD_LENGTH, len(raw))

    def start_leg(self, number: int) -> None:
        """A new leg counts its bytes from zero; the tokens of the earlier ones stay."""
        self.written = self.delivered = 0
        _U64.pack_into(self._memory, self._base + _AT_DELIVERED, 0)
        _U64.pack_into(self._memory, self._base + _AT_WRITTEN, 0)
        self._write_checkpoint(replace(self.checkpoint, leg=number, counted=0, chunk_rest=-1))

    def append(self, data: bytes) -> None:
        """Journals bytes that are about to be forwarded. The ring keeps the newest RING_BYTES."""
        kept = data[-RING_BYTES:]
        position = (self.written + len(data) - len(kept)) % RING_BYTES
        first = min(len(kept), RING_BYTES - position)
        self._memory[self._ring + position : self._ring + position + first] = kept[:first]
        if first < len(kept):
            self._memory[self._ring : self._ring + len(kept) - first] = kept[first:]
        self.written += len(data)
        _U64.pack_into(self._memory, self._base + _AT_WRITTEN, self.written)

    def mark_delivered(self, position: int) -> None:
        """The client's TCP has accepted the body of this leg up to `position`."""
        self.delivered = position
        _U64.pack_into(self._memory, self._base + _AT_DELIVERED, position)

    def save(self, checkpoint: Checkpoint) -> None:
        if checkpoint != self.checkpoint:
            self._write_checkpoint(checkpoint)

    def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        # Two copies and a selector: a kill in the middle leaves the old copy chosen.
        (current,) = _SELECTOR.unpack_from(self._memory, self._base + _AT_SELECTOR)
        other = 1 - (current & 1)
        _CHECKPOINT.pack_into(
            self._memory,
            self._base + _AT_CHECKPOINT[other],
            checkpoint.counted,
            checkpoint.leg,
            checkpoint.chunk_rest + 1,
            checkpoint.prompt_tokens,
            checkpoint.completion_tokens,
            checkpoint.finished,
        )
        _SELECTOR.pack_into(self._memory, self._base + _AT_SELECTOR, other)
        self.checkpoint = checkpoint

    def _read(self) -> Left:
        (length,) = _STATE.unpack_from(self._memory, self._base + _AT_RECORD_LENGTH)
        start = self._base + _RECORD_OFFSET
        record = json.loads(self._memory[start : start + length]) if 0 < length <= _RECORD_MAX else None
        (selector,) = _SELECTOR.unpack_from(self._memory, self._base + _AT_SELECTOR)
        values = _CHECKPOINT.unpack_from(self._memory, self._base + _AT_CHECKPOINT[selector & 1])
        self.checkpoint = Checkpoint(
            counted=values[0],
            leg=values[1],
            chunk_rest=values[2] - 1,
            prompt_tokens=values[3],
            completion_tokens=values[4],
            finished=bool(values[5]),
        )
        (self.written,) = _U64.unpack_from(self._memory, self._base + _AT_WRITTEN)
        (self.delivered,) = _U64.unpack_from(self._memory, self._base + _AT_DELIVERED)
        return Left(self, record, self.checkpoint, self.uncounted())

    def uncounted(self) -> bytes:
        """What was delivered since the checkpoint. Empty when a single huge event overran the ring."""
        return self._between(self.checkpoint.counted, self.delivered)

    def _between(self, start: int, end: int) -> bytes:
        if end <= start or self.written - start > RING_BYTES:
            return b""
        low, high = start % RING_BYTES, end % RING_BYTES
        ring = self._memory[self._ring : self._ring + RING_BYTES]
        return ring[low:high] if low < high else ring[low:] + ring[:high]


class Journal:
    """The file. One gateway process owns it at a time."""

    def __init__(self, path: Path, slots: int = 1024) -> None:
        """Opens or makes the file. Raises JournalTaken, and RuntimeError for a file of another layout.

        One with more slots keeps them: some may hold answers.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise JournalTaken(
                f"the gateway journal {path.name} belongs to another running gateway"
            ) from None
        found = os.pread(self._file, _FILE_HEADER.size, 0)
        if found:
            magic, found_slots, slot_bytes = _FILE_HEADER.unpack(found.ljust(_FILE_HEADER.size, b"\0"))
            if (magic, slot_bytes) != (_MAGIC, _SLOT_BYTES):
                os.close(self._file)
                raise RuntimeError(
                    f"the gateway journal {path.name} has another layout: "
                    "settle it with the version that wrote it"
                )
            slots = max(slots, found_slots)
        size = _HEADER_BYTES + slots * _SLOT_BYTES
        wanted = _FILE_HEADER.pack(_MAGIC, slots, _SLOT_BYTES)
        os.ftruncate(self._file, size)  # sparse: a slot takes disk space when it is first used
        self._memory = mmap.mmap(self._file, size)
        self._memory[: len(wanted)] = wanted
        self._free: list[Slot] = []
        self._left: list[Slot] = []
        for number in reversed(range(slots)):
            slot = Slot(self._memory, number)
            (state,) = _STATE.unpack_from(self._memory, slot._base)
            (self._left if state == OPEN else self._free).append(slot)

    @property
    def left_slots(self) -> Sequence[Slot]:
        """Those of the gateway that had the file before, as far as left_behind has not given them yet."""
        return tuple(self._left)

    def left_behind(self) -> Iterator[Left]:
        """Answers of the gateway that had the file before. Free each slot once it is settled."""
        while self._left:
            yield self._left.pop()._read()

    def open(self) -> Slot:
        """A slot for a new answer, on record from here on. Raises JournalFull."""
        if not self._free:
            raise JournalFull
        slot = self._free.pop()
        slot._clear()
        _STATE.pack_into(self._memory, slot._base + _AT_STATE, OPEN)
        return slot

    def free(self, slot: Slot) -> None:
        """Forgets the answer: its usage is in the database, or there was nothing to charge."""
        _STATE.pack_into(self._memory, slot._base + _AT_STATE, FREE)
        self._free.append(slot)

    @property
    def in_use(self) -> int:
        return (len(self._memory) - _HEADER_BYTES) // _SLOT_BYTES - len(self._free)

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)
