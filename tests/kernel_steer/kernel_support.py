"""What the tests of the kernel engine share."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from kernel_steer.engine.kernel import selftest
from kernel_steer.engine.kernel.flow import KernelFlow


@functools.cache
def why_not() -> str:
    """What speaks against the kernel engine on this machine; empty when nothing does."""
    return next((check.detail for check in selftest.run() if not check.ok), "")


needs_kernel_engine = pytest.mark.skipif(bool(why_not()), reason=f"no kernel engine here: {why_not()}")


def event(number: int, *, finish: str | None = None, text: str = "word") -> bytes:
    """One chunk with one event, as a model server writes it."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish, "token_ids": [number]}
    payload = b"data: " + json.dumps({"id": "chatcmpl-1", "choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def redirected(flow: KernelFlow) -> int:
    """Bytes that took the short way."""
    return flow._lane.redirected


def passed(flow: KernelFlow) -> int:
    return flow._lane.passed


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Stands in for socket.socketpair() where the kernel engine has to do its work."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


async def until(condition: Callable[[], bool], *, timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.001)


async def spliced(s: Any) -> tuple[asyncio.Task, bytes]:
    """Brings the flow to where the kernel forwards on its own; what the client has got until then."""
    pumping = asyncio.ensure_future(s.pump())
    got = b""
    for n in range(50):
        await s.send(event(n))
        got += await s.receive(len(event(n)))
        if redirected(s.flow):
            return pumping, got
    raise AssertionError("nothing is redirected")


def peek(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100, socket.MSG_PEEK)
    except BlockingIOError:
        return b""
