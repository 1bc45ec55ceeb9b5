"""The ring buffer through which the program wakes user space."""

from __future__ import annotations

import mmap
import struct

_U32 = struct.Struct("=I")
_HEADER_BYTES = 8
_BUSY, _DISCARD = 1 << 31, 1 << 30


class Events:
    """Yields the slots that want attention. `fd` is readable while there are any."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self._size = size
        # Page 0 is ours to write: how far we have read. Page 1: how far the kernel has written. Then the data.
        self._ours = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._theirs = mmap.mmap(
            fd, mmap.PAGESIZE + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=mmap.PAGESIZE
        )
        self._read = memoryview(self._ours).cast("Q")
        self._written = memoryview(self._theirs)[: mmap.PAGESIZE].cast("Q")
        self._data = memoryview(self._theirs)[mmap.PAGESIZE :]

    def take(self) -> list[int]:
        slots = []
        position = self._read[0]
        while position < self._written[0]:
            at = position & (self._size - 1)
            (header,) = _U32.unpack_from(self._data, at)
            if header & _BUSY:
                break  # being written; the kernel wakes us again
            length = header & ~(_BUSY | _DISCARD)
            if not header & _DISCARD:
                slots.append(_U32.unpack_from(self._data, at + _HEADER_BYTES)[0])
            position += (length + _HEADER_BYTES + 7) & ~7
            self._read[0] = position
        return slots

    def close(self) -> None:
        for view in (self._read, self._written, self._data):
            view.release()
        self._ours.close()
        self._theirs.close()
