"""How processes end: waiting for it, making it happen, and saying it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress

import psutil


async def wait_exit(child: subprocess.Popen[bytes]) -> None:
    """Returns when the process has ended, whoever else still holds its pipes."""
    if child.poll() is not None:
        return
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(child.pid)
    loop.add_reader(descriptor, readable.set)
    try:
        while child.poll() is None:
            await readable.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def kill_tree(pid: int) -> None:
    """SIGKILL to a group, and to descendants that have groups of their own."""
    with suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                descendant.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def describe_end(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
