"""Maps that other processes can open, and that outlive the process which made them.

Each engine has a folder of its own under /sys/fs/bpf/apex and holds a lock for as long as it lives
(bpffs has no files to lock, so the lock is under /run/apex). Its file also says where the gateway's journal
is: a folder whose lock nobody holds was left by a dead gateway, and is what completes that journal.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.kernel import bpf

BPFFS = Path("/sys/fs/bpf")
ROOT = BPFFS / "apex"
LOCKS = Path("/run/apex")
_BPFFS_MAGIC = 0xCAFE4A11
_libc = ctypes.CDLL(None, use_errno=True)


class PinsUnavailable(RuntimeError):
    """Nothing can be pinned here; the message says why."""


def ensure_bpffs() -> None:
    """Mounts the BPF file system when it is not. Raises PinsUnavailable."""
    if not BPFFS.is_dir():
        raise PinsUnavailable(f"{BPFFS} does not exist: the kernel has no BPF file system")
    if _filesystem_type(BPFFS) != _BPFFS_MAGIC:
        done = _libc.mount(b"bpf", os.fsencode(BPFFS), b"bpf", 0, b"mode=0700")
        if done:
            reason = os.strerror(ctypes.get_errno())
            raise PinsUnavailable(f"the BPF file system is not mounted at {BPFFS} and cannot be: {reason}")


def _filesystem_type(path: Path) -> int:
    buffer = ctypes.create_string_buffer(256)  # struct statfs; f_type is its first long
    if _libc.statfs(os.fsencode(path), buffer):
        return 0
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], "little")


class Owner:
    """The name of a living engine, and the folder with its pins."""

    def __init__(self) -> None:
        """Raises PinsUnavailable."""
        ensure_bpffs()
        self.number = secrets.randbits(63) | 1
        self.folder = folder_of(self.number)
        with ExitStack() as undo:
            try:
                LOCKS.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._lock = os.open(_lock_path(self.folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, self._lock)
                undo.callback(_lock_path(self.folder).unlink, missing_ok=True)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.folder.mkdir(parents=True, mode=0o700)
            except OSError as error:
                raise PinsUnavailable(f"{self.folder} cannot be made: {error.strerror}") from error
            undo.pop_all()

    def pin(self, name: str, fd: int) -> None:
        """Raises OSError."""
        bpf.pin(fd, str(self.folder / name))

    def note_journal(self, path: str) -> None:
        """Where to complete what this engine delivered, should it be killed."""
        os.pwrite(self._lock, os.fsencode(path) + b"\n", 0)

    def close(self) -> None:
        remove(self.folder)
        os.close(self._lock)


def folder_of(number: int) -> Path:
    return ROOT / f"{number:016x}"


def _lock_path(folder: Path) -> Path:
    return LOCKS / f"{folder.name}.lock"


def owners() -> Iterator[Path]:
    """The folders of all engines on this machine, dead ones too."""
    with suppress(OSError):
        yield from sorted(path for path in ROOT.iterdir() if path.is_dir())


@contextmanager
def claim_dead(folder: Path) -> Iterator[Path | None]:
    """Holds a dead engine's lock; the journal it noted (an empty path when none).

    Gives None while the engine lives, or somebody else takes care of it, or its lock is not on this
    machine's /run (another container's): then its folder is not ours to touch.
    """
    try:
        fd = os.open(_lock_path(folder), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield Path(os.fsdecode(os.pread(fd, 4096, 0).split(b"\n")[0]))
    finally:
        os.close(fd)


def remove(folder: Path) -> None:
    """Gives up pins. What a living process still uses stays in memory."""
    with suppress(FileNotFoundError):
        for pin in list(folder.iterdir()):
            pin.unlink(missing_ok=True)
        folder.rmdir()
    _lock_path(folder).unlink(missing_ok=True)


# --- flips ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def node_number(name: str) -> int:
    """Key of a node in the map `node`: a digest of its name."""
    return int.from_bytes(node_key(name), sys.byteorder)


def node_key(name: str) -> bytes:
    """The same as it stands in memory."""
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def first_live_epoch(fd: int, name: str) -> int:
    """Incarnations below it have been flipped away."""
    return bpf.lookup_word(fd, node_number(name)) or 0


def write_flip(fd: int, node: NodeKey) -> bool:
    """The flip: one write of 8 bytes, whatever the number of flows. False when it was flipped already."""
    key = node_number(node.name)
    if (bpf.lookup_word(fd, key) or 0) > node.epoch:
        return False
    bpf.update_word(fd, key, node.epoch + 1)
    return True


def take_flip_back(fd: int, node: NodeKey) -> bool:
    """Undoes the flip of this incarnation. False when it was not flipped, or a later one has been since."""
    key = node_number(node.name)
    if bpf.lookup_word(fd, key) != node.epoch + 1:
        return False
    bpf.update_word(fd, key, node.epoch)
    return True


class NodeMaps:
    """The maps `node` of engines on this machine, opened beforehand, for a process that is none of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a descriptor must not be closed while it is written to
        self._opened: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._opened)

    def refresh(self, wanted: Set[str]) -> None:
        """Holds those of the `wanted` owners (names of their folders) that are here and may be opened.

        Raises nothing. Not for two threads at a time.
        """
        present = wanted & {folder.name for folder in owners()}
        found: dict[str, int] = {}
        for name in present - self._opened.keys():
            with suppress(OSError):  # just being made or removed, or not for us
                found[name] = bpf.open_pin(str(ROOT / name / "node"))
        with self._lock:
            self._opened |= found
            for name in self._opened.keys() - present:
                os.close(self._opened.pop(name))

    def flip(self, node: NodeKey) -> int:
        """Flips the node away, whatever those engines' processes are doing. Returns in how many. Raises nothing."""
        return self._write(write_flip, node)

    def take_back(self, node: NodeKey) -> int:
        """Undoes it. Returns in how many. Raises nothing."""
        return self._write(take_flip_back, node)

    def _write(self, write: Callable[[int, NodeKey], bool], node: NodeKey) -> int:
        written = 0
        with self._lock:
            for fd in self._opened.values():
                with suppress(OSError):  # a map that is full: its engine hears of it by the carriers
                    written += write(fd, node)
        return written

    def close(self) -> None:
        with self._lock:
            for fd in self._opened.values():
                os.close(fd)
            self._opened.clear()
