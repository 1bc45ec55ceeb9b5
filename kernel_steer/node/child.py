"""What a node worker does for its engine and adapter: start them, keep them, take them with it.

The children stay in the worker's process group, and the kernel kills them when the worker dies, however
it dies: a node is there as a whole or not at all.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_PARENT = "APEX_NODE_WORKER_PID"
_PR_SET_PDEATHSIG = 1
_BACKOFF_S = (1.0, 30.0)
# A child that lived this long was well: its next death starts with the shortest delay again.
_SETTLED_S = 60.0
_POLL_S = 0.2


def die_with_parent() -> None:
    """In a child: ties its life to the node worker that started it; nothing when a person started it.

    The signals that ask the worker to stop often go to the whole group. The child ignores them: the
    worker first says that the node leaves, then ends its children itself.
    """
    parent = os.environ.get(_PARENT)
    if parent is None:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("apex: the node worker ended before its child began")


@dataclass
class _Child:
    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    delay_s: float = _BACKOFF_S[0]
    start_at: float = field(default_factory=time.monotonic)


class Keeper(threading.Thread):
    """Runs programs and starts a dead one again, until `stop` is set; then kills and reaps them all.

    They are started by this thread, for to the kernel the parent that counts is the thread: the
    children live exactly as long as it does.
    """

    def __init__(self, commands: dict[str, Sequence[str]], stop: threading.Event) -> None:
        super().__init__(name="node-children", daemon=True)
        self._children = [_Child(name, command) for name, command in commands.items()]
        self._stop_asked = stop

    def run(self) -> None:
        try:
            while not self._stop_asked.is_set():
                for child in self._children:
                    self._tend(child)
                self._stop_asked.wait(_POLL_S)
        finally:
            for child in self._children:
                if child.process is not None:
                    child.process.kill()
                    child.process.wait()

    def _tend(self, child: _Child) -> None:
        now = time.monotonic()
        if child.process is None:
            if now >= child.start_at:
                self._start(child)
            return
        status = child.process.poll()
        if status is None:
            return
        if now - child.started_at > _SETTLED_S:
            child.delay_s = _BACKOFF_S[0]
        logger.error("%s ended with status %d, starts again in %.0f s", child.name, status, child.delay_s)
        child.process, child.start_at = None, now + child.delay_s
        child.delay_s = min(child.delay_s * 2, _BACKOFF_S[1])

    def _start(self, child: _Child) -> None:
        child.started_at = time.monotonic()
        environ = {**os.environ, _PARENT: str(os.getpid())}
        child.process = subprocess.Popen(child.command, stdin=subprocess.DEVNULL, env=environ)
        logger.info("%s started as process %d", child.name, child.process.pid)
