"""Does this kernel do what the engine builds on? Asked on loopback, in some 50 ms, before the engine is used.

SOCKHASH and sk_skb have changed their behaviour between kernels more than once, and some of what is used
here is documented nowhere. A kernel that answers one question differently gets the relay engine.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.kernel import bpf, pins, tcp
from kernel_steer.engine.kernel.compile import CannotCompile, get_bytecode
from kernel_steer.engine.kernel.lane import Lane, LaneUnavailable
from kernel_steer.engine.kernel.layout import RING_BYTES, SEGMENTS_MAX
from kernel_steer.engine.kernel.probe import probe
from kernel_steer.engine.kernel.program import Program

_PATIENCE_S = 10.0
_LANES = 4
_NODE = NodeKey("selftest", 1)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    detail: str


class _Wrong(Exception):
    """The kernel did something else than it should."""


def run() -> list[Check]:
    """Every check in turn; all are ok where the engine may be used. Never raises."""
    if reason := probe():
        return [Check("requirements", ok=False, detail=reason)]
    checks = [Check("requirements", ok=True, detail="kernel, rights, BPF file system and compiler are there")]
    try:
        program = Program(get_bytecode(), flows_max=_LANES)
    except (OSError, CannotCompile) as error:
        return [*checks, Check("load", ok=False, detail=str(error))]
    try:
        checks.append(Check("load", ok=True, detail="the verifier takes the program"))
        checks += [_ask(name, question, program) for name, question in _QUESTIONS.items()]
    finally:
        program.close()
    return checks


def _ask(name: str, question: Callable[[Program], str], program: Program) -> Check:
    try:
        return Check(name, ok=True, detail=question(program))
    except (_Wrong, OSError, LaneUnavailable, pins.PinsUnavailable) as error:
        return Check(name, ok=False, detail=str(error))


# --- the bench -----------------------------------------------------------------------------------------


class _Bench:
    """A client, nodes, and lanes from these to that."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._sockets: list[socket.socket] = []
        self._lanes: list[Lane] = []
        self.client, self.ours = self._connect()

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        for sock in (far, near):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets += [far, near]
        return far, near

    def connect_node(self) -> tuple[socket.socket, socket.socket]:
        return self._connect()

    def open_lane(self, backend: socket.socket) -> Lane:
        lane = Lane(self._program, len(self._lanes))
        self._lanes.append(lane)
        lane.open(self.ours, backend, node=_NODE, already_read=0)
        return lane

    def receive(self, count: int) -> bytes:
        return _receive(self.client, count)

    def close(self) -> None:
        for lane in self._lanes:
            lane.forget()
        for sock in self._sockets:
            sock.close()
        for lane in self._lanes:
            lane.reset()
            lane.release()


@contextmanager
def _bench(program: Program) -> Iterator[_Bench]:
    bench = _Bench(program)
    try:
        yield bench
    finally:
        bench.close()


def _event(number: int) -> bytes:
    payload = (
        b"data: " + json.dumps({"choices": [{"index": number, "finish_reason": None}]}).encode() + b"\n\n"
    )
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _receive(sock: socket.socket, count: int) -> bytes:
    """What comes within the time, up to `count`."""
    got = b""
    deadline = time.monotonic() + _PATIENCE_S
    while len(got) < count and time.monotonic() < deadline:
        try:
            piece = sock.recv(65536)
        except BlockingIOError:
            time.sleep(0.0002)
            continue
        if not piece:
            break
        got += piece
    return got


def _wait(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise _Wrong(what)
        time.sleep(0.0002)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise _Wrong(what)


# --- the questions -------------------------------------------------------------------------------------


def _redirect(program: Program) -> str:
    with _bench(program) as bench:
        node, backend = bench.connect_node()
        lane = bench.open_lane(backend)
        base = tcp.progress(bench.ours).accepted
        lane.splice(acked=0)
        sent = b"".join(_event(n) for n in range(3))
        for n in range(3):
            node.send(_event(n))
        _expect(bench.receive(len(sent)) == sent, "redirected bytes do not arrive as they were sent")
        _expect((lane.redirected, lane.passed) == (len(sent), 0), "plain events are not redirected")
        _expect(lane.read_ring(0, lane.redirected) == sent, "the ring does not hold what was redirected")
        _wait(
            "TCP does not account for redirected bytes",
            lambda: tcp.progress(bench.ours).accepted - base == len(sent),
        )
        lane.stop()
        tcp.wait_for_its_lock(backend)
        node.send(_event(3))
        _expect(_receive(backend, len(_event(3))) == _event(3), "a closed route still takes bytes")
        _expect(lane.redirected == len(sent), "a closed route still redirects")
    return "plain events go to the client, through the ring; a closed route takes none"


def _positions(program: Program) -> str:
    with _bench(program) as bench:
        node, backend = bench.connect_node()
        lane = bench.open_lane(backend)
        lane.splice(acked=0)
        for n in range(3):
            node.send(_event(n))
        bench.receive(3 * len(_event(0)))
        _expect(lane.redirected > 0 and not lane.overlapped, "cb[] does not hold sequence numbers")
        node.send(_event(3), socket.MSG_MORE)
        node.shutdown(socket.SHUT_WR)  # the FIN rides on the data
        _expect(
            _receive(backend, len(_event(3)) + 1) == _event(3), "the last bytes before a FIN are not passed"
        )
        _expect(lane.node_closed, "a FIN on data is not seen in cb[]")
    return "cb[] holds sequence numbers; a FIN on data is seen"


def _fin_guard(program: Program) -> str:
    with _bench(program) as bench:
        node, backend = bench.connect_node()
        lane = bench.open_lane(backend)
        lane.splice(acked=0)
        node.send(_event(0))
        bench.receive(len(_event(0)))
        node.close()
        _wait("the program does not see a bare FIN", lambda: lane.node_closed)
        _expect(backend.recv(1) == b"", "user space does not see the end")
        second, its_backend = bench.connect_node()
        after = bench.open_lane(its_backend)
        after.splice(acked=0)
        second.send(_event(1))
        _expect(bench.receive(len(_event(1))) == _event(1), "after a node's FIN the client cannot be reached")
    return "a node's FIN leaves the client's socket alone"


def _queued(program: Program) -> str:
    with _bench(program) as bench:
        node, backend = bench.connect_node()
        node.send(_event(0))
        _wait("loopback is silent", lambda: _peek(backend) > 0)
        lane = bench.open_lane(backend)
        lane.splice(acked=0)
        node.send(_event(1))
        with suppress(BlockingIOError):
            _expect(backend.recv(65536) == b"", "redirected bytes also reach user space")
        sent = _event(0) + _event(1)
        _expect(bench.receive(len(sent)) == sent, "queued bytes are lost or doubled")
        _expect(lane.redirected == len(sent), "queued bytes were not counted once")
    return "what was queued and peeked at before comes once, in order"


def _peek(sock: socket.socket) -> int:
    try:
        return len(sock.recv(65536, socket.MSG_PEEK))
    except BlockingIOError:
        return 0


def _passing(program: Program) -> str:
    with _bench(program) as bench:
        node, backend = bench.connect_node()
        lane = bench.open_lane(backend)
        lane.splice(acked=0)
        odd = b"5\r\nother\r\n"
        node.send(odd)
        _wait("odd bytes are not passed", lambda: lane.passed == len(odd))
        node.send(_event(0))
        got = _receive(backend, len(odd + _event(0)))
        _expect(got == odd + _event(0), "an event overtook bytes that wait for user space")
        _expect(_queued_bytes(backend) == 0, "FIONREAD counts bytes that were read")
        lane.splice(acked=len(got))
        node.send(_event(1))
        _expect(bench.receive(len(_event(1))) == _event(1), "the route does not open again")
        node.send(odd)
        _wait("FIONREAD does not count passed bytes", lambda: _queued_bytes(backend) == len(odd))
    return "what is not plain waits for user space, and nothing overtakes it"


def _queued_bytes(sock: socket.socket) -> int:
    return int(struct.unpack("=i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))[0])


def _bound(program: Program) -> str:
    with _bench(program) as bench:
        node, backend = bench.connect_node()
        lane = bench.open_lane(backend)
        lane.splice(acked=0)
        sent = 0
        for n in range(2 * SEGMENTS_MAX):
            sent += node.send(_event(n))
            _wait("bytes are neither redirected nor passed", lambda: lane.redirected + lane.passed == sent)  # noqa: B023
            if lane.passed:
                break
        _expect(lane.passed > 0, "there is no bound to what is redirected")
        _expect(
            lane.redirected <= RING_BYTES and lane.segments <= SEGMENTS_MAX,
            "more was redirected than has room",
        )
    return f"without user space at most {RING_BYTES} bytes or {SEGMENTS_MAX} segments are redirected"


def _clients_words(program: Program) -> str:
    with _bench(program) as bench:
        _, backend = bench.connect_node()
        bench.open_lane(backend)
        bench.client.send(b"next request")
        _wait("what a client sends does not arrive", lambda: _peek(bench.ours) == 12)
        counted = _queued_bytes(bench.ours)
        _expect(bench.ours.recv(100) == b"next request", "what a client sends is not read as it was sent")
    return f"a client in the map is read as ever (FIONREAD says {counted} of 12, which nothing here asks)"


def _flip(program: Program) -> str:
    owner = pins.Owner()
    try:
        owner.pin("node", program.maps["node"])
        opened = bpf.open_pin(str(owner.folder / "node"))
        try:
            _expect(pins.write_flip(opened, _NODE), "a pinned map cannot be written")
        finally:
            os.close(opened)
        with _bench(program) as bench:
            node, backend = bench.connect_node()
            lane = bench.open_lane(backend)
            lane.splice(acked=0)
            node.send(_event(0))
            _wait("a flip through a pin is not heeded", lambda: lane.passed == len(_event(0)))
    finally:
        pins.take_flip_back(program.maps["node"], _NODE)
        owner.close()
    return f"maps can be pinned under {pins.ROOT}, and a flip through the pin is heeded"


_QUESTIONS: dict[str, Callable[[Program], str]] = {
    "redirect": _redirect,
    "sequence_numbers": _positions,
    "fin_guard": _fin_guard,
    "queued_bytes": _queued,
    "pass_order": _passing,
    "backlog_bound": _bound,
    "client_reads": _clients_words,
    "pinned_flip": _flip,
}
