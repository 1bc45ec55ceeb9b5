"""What a running stack leaves on disk: a lock that dies with it, and a note of what it started.

After `kill -9` of the supervisor the kernel has already told its children to end; the note and a mark in
their environment let the next start find whatever did not listen.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

# In the environment of every supervised process; the value is the var folder of its stack.
MARK = "APEX_STACK"
_GRACE_S = 5.0
_CLOCK_SLACK_S = 1.0
_TRIES = 10
_PAUSE_S = 0.05


class AlreadyRunning(RuntimeError):
    """Another supervisor works on the same var folder; the message names it."""


@dataclass(frozen=True)
class StateFolder:
    """`var` is the folder that a stack owns; at most one stack runs on it at a time."""

    var: Path

    @property
    def note(self) -> Path:
        return self.var / "run" / "stack.json"

    @property
    def _lock(self) -> Path:
        return self.var / "run" / "stack.lock"

    def lock(self) -> IO[str]:
        """Held until the file is closed or the process ends, however it ends. Raises AlreadyRunning."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        handle = self._lock.open("a+", encoding="utf-8")
        if not _lock_soon(handle):
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            handle.close()
            raise AlreadyRunning(
                f"a stack already runs on {self.var} (pid {owner}): stop it, or set APEX_VAR_DIR to another folder"
            )
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        return handle

    def is_locked(self) -> bool:
        """Whether a stack runs here, or is about to."""
        try:
            with self._lock.open(encoding="utf-8") as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def write(self, processes: Iterable[tuple[str, int]], addresses: Mapping[str, str]) -> None:
        entries = []
        for name, pid in processes:
            try:
                entries.append({"name": name, "pid": pid, "create_time": psutil.Process(pid).create_time()})
            except psutil.NoSuchProcess:
                continue
        content = {"supervisor": os.getpid(), "processes": entries, "addresses": dict(addresses)}
        draft = self.note.with_suffix(".new")
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(self.note)

    def read(self) -> dict[str, Any]:
        """The note of the last stack; empty when there is none or it cannot be read."""
        try:
            content = json.loads(self.note.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def running_addresses(self) -> dict[str, str]:
        """The addresses of the stack that runs here, as environment variables; empty when none does."""
        if not self.is_locked():
            return {}
        addresses = self.read().get("addresses", {})
        return {str(name): str(value) for name, value in addresses.items()}

    def forget(self) -> None:
        self.note.unlink(missing_ok=True)

    def reap_leftovers(self) -> list[str]:
        """Ends what an earlier stack left, with all descendants. Call only with the lock held."""
        noted = {entry["pid"]: entry["create_time"] for entry in self.read().get("processes", [])}
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            if process.pid != os.getpid() and self._is_ours(process, noted):
                found[process.pid] = process
                try:
                    found.update({child.pid: child for child in process.children(recursive=True)})
                except psutil.NoSuchProcess:
                    continue
        # The kernel sent them their stop signal when their supervisor died; let a clean stop finish.
        _, alive = psutil.wait_procs(found.values(), timeout=_GRACE_S)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=_GRACE_S)
        self.forget()
        return [f"pid {pid}" for pid in found]

    def _is_ours(self, process: psutil.Process, noted: Mapping[int, float]) -> bool:
        try:
            if process.pid in noted and abs(process.create_time() - noted[process.pid]) < _CLOCK_SLACK_S:
                return True
            return process.environ().get(MARK) == str(self.var)
        except (psutil.Error, OSError):
            return False


def _lock_soon(handle: IO[str]) -> bool:
    """Not at the first try only: somebody may be asking `is_locked` at this moment."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(_PAUSE_S)
        else:
            return True
    return False
