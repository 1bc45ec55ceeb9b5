"""What was delivered, after a `kill -9` of the gateway: the kernel knows it.

The journal file has what user space saw. Behind that are at most RING_BYTES that the kernel had
redirected, in a ring which is pinned and so outlives the process. While a flow is open, spare words of
its journal slot name the ring: owner, lane, generation. Whichever engine starts next on this machine
copies the missing bytes over; then the journal says everything, and is settled as ever.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from kernel_steer import journal
from kernel_steer.engine.kernel import bpf, pins
from kernel_steer.engine.kernel.lane import read_ring
from kernel_steer.engine.kernel.layout import FLOW_BYTES, FLOW_WORDS, RING_BYTES, RING_STRIDE, Word
from kernel_steer.engine.kernel.program import map_array
from kernel_steer.journal import Slot

log = logging.getLogger(__name__)
# Owner, lane, generation, in the part of a slot's header that the journal leaves alone and clears with it.
_STAMP = struct.Struct("=QQQ")
_AT_STAMP = 192


def stamp(slot: Slot, *, owner: int, lane: int, generation: int) -> None:
    """Names the ring that has the newest bytes of the slot's leg."""
    _STAMP.pack_into(slot._memory, slot._base + _AT_STAMP, owner, lane, generation)


def clear_stamp(slot: Slot) -> None:
    """The slot has everything itself."""
    stamp(slot, owner=0, lane=0, generation=0)


def path_of(slot: Slot) -> str:
    """The file that the slot is in, as the kernel has it mapped; empty when it is no file."""
    anchor = ctypes.c_char.from_buffer(slot._memory)
    address = ctypes.addressof(anchor)
    del anchor  # it would keep the mapping from being closed
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if low <= address < high:
            return line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
    return ""


def complete_journals() -> int:
    """Takes care of every dead engine on this machine. To be called before a gateway opens its journal.

    Returns how many answers had bytes that only the kernel knew. Never raises: what cannot be read any
    more is said in the log.
    """
    completed = 0
    for folder in pins.owners():
        with pins.claim_dead(folder) as path:
            if path is None:
                continue
            try:
                completed += _complete(folder, path)
            except (OSError, ValueError) as error:
                log.warning("the kernel's part of the journal of a dead gateway is lost: %s", error)
            pins.remove(folder)
    return completed


def wait_until_complete(slots: Sequence[Slot], *, patience_s: float = 10.0) -> None:
    """For slots of a gateway that is dead: whoever starts first on this machine completes them, and it may be at it now.

    Reading them earlier would charge too little.
    """
    deadline = time.monotonic() + patience_s
    while waiting := [slot.number for slot in slots if _has_its_ring_elsewhere(slot)]:
        if time.monotonic() > deadline:
            log.warning("the kernel's part of %d answers of a dead gateway is not to be had", len(waiting))
            return
        complete_journals()
        time.sleep(0.02)


def _has_its_ring_elsewhere(slot: Slot) -> bool:
    owner, _, _ = _STAMP.unpack_from(slot._memory, slot._base + _AT_STAMP)
    return owner != 0 and pins.folder_of(owner).is_dir()


def _complete(folder: Path, path: Path) -> int:
    if not path.name or not path.exists():
        return 0  # it never carried anything
    owner = int(folder.name, 16)
    kernel = _KernelPart(folder)
    try:
        with _open_journal(path) as memory:
            slots = [Slot(memory, number) for number in range(_slots_in(memory))]
            return sum(kernel.complete(slot, owner) for slot in slots)
    finally:
        kernel.close()


def _open_journal(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def _slots_in(memory: mmap.mmap) -> int:
    magic, slots, slot_bytes = journal._FILE_HEADER.unpack_from(memory)
    if (magic, slot_bytes) != (journal._MAGIC, journal._SLOT_BYTES):
        raise ValueError("its journal has another layout")
    return int(slots)


class _KernelPart:
    """The maps of a dead engine."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        fds = []
        try:
            fds += [bpf.open_pin(str(folder / "flows")), bpf.open_pin(str(folder / "rings"))]
            self._lanes = bpf.max_entries(fds[0])
            self._flows = map_array(fds[0], self._lanes * FLOW_BYTES)
            self._rings = map_array(fds[1], self._lanes * RING_STRIDE)
        finally:
            for fd in fds:
                os.close(fd)

    def complete(self, slot: Slot, owner: int) -> bool:
        """Brings the slot to what the kernel had redirected. True when something was missing."""
        named, lane, generation = _STAMP.unpack_from(slot._memory, slot._base + _AT_STAMP)
        if named != owner or lane >= self._lanes:
            return False
        words = struct.unpack_from(f"={FLOW_WORDS}Q", self._flows, lane * FLOW_BYTES)
        redirected = words[Word.REDIRECTED]
        if words[Word.GENERATION] != generation or not redirected:
            return False
        slot._read()
        # Every redirected byte came after all acknowledged ones had been written to the client.
        delivered = words[Word.ALREADY_READ] + words[Word.ACKED] + redirected
        missing = min(delivered - slot.written, redirected, RING_BYTES)
        if missing > 0:
            with memoryview(self._rings)[lane * RING_STRIDE :][:RING_BYTES] as ring:
                slot.append(read_ring(ring, redirected - missing, redirected))
        if slot.delivered < delivered <= slot.written:
            slot.mark_delivered(delivered)
        clear_stamp(slot)
        return missing > 0

    def close(self) -> None:
        self._flows.close()
        self._rings.close()
