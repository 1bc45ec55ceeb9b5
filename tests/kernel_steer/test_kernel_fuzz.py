"""Random segments, random pieces, random readers: the program against models in Python."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_steer.engine.base import LegEnd
from kernel_steer.engine.kernel import KernelEngine, selftest
from kernel_steer.engine.kernel.compile import get_bytecode
from kernel_steer.engine.kernel.layout import CHUNKS_MAX, SEGMENT_MAX
from kernel_steer.engine.kernel.program import Program
from kernel_steer.resume.reader import LegReader
from tests.kernel_steer.kernel_support import event, needs_kernel_engine, redirected
from tests.kernel_steer.stand import Stand

pytestmark = needs_kernel_engine

NASTY = [
    b'"finish_reason": null',
    b'"finish_reason":null',
    b'"finish_reason": "stop"',
    b'"finish_reason":"abort"',
    b'"finish_reason" : "abort"',
    b'"stop_reason": null',
    b'"error"',
    b"[DONE]",
    b"\n\n",
    b"\r\n",
    b"\n",
    b"data: ",
    b"0\r\n\r\n",
    b'data: {"',
    b"}\n\n\r\n",
    b"\\u0022",
    b'"',
    b"f",
]
words = st.text(max_size=40)
plain_events = st.builds(lambda n, text: event(n, text=text), st.integers(0, 9999), words)
any_events = st.builds(
    lambda n, text, finish: event(n, text=text, finish=finish),
    st.integers(0, 9999),
    words,
    st.sampled_from([None, None, None, "stop", "abort"]),
)


@st.composite
def broken_segments(draw: st.DrawFn) -> bytes:
    segment = b"".join(draw(st.lists(any_events, min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(segment)))
        cut = draw(st.integers(0, 30))
        segment = segment[:at] + draw(st.sampled_from(NASTY) | st.binary(max_size=3)) + segment[at + cut :]
    return segment or b"x"


class Judge:
    """One flow whose user space does nothing: which way does a segment take?"""

    def __init__(self) -> None:
        self.program = Program(get_bytecode(), flows_max=1)
        self.bench = selftest._Bench(self.program)
        self.node, self.backend = self.bench.connect_node()
        self.lane = self.bench.open_lane(self.backend)
        self.read = 0

    def redirects(self, segment: bytes) -> bool:
        lane = self.lane
        lane.consume(lane.redirected, lane.segments)
        lane.splice(acked=self.read)
        before = lane.redirected
        self.node.send(segment)
        deadline = time.monotonic() + 30
        while lane.redirected + lane.passed < before + self.read + len(segment):
            assert time.monotonic() < deadline
        if lane.redirected == before:
            assert selftest._receive(self.backend, len(segment)) == segment
            self.read += len(segment)
            return False
        assert self.bench.receive(len(segment)) == segment
        assert lane.read_ring(before, lane.redirected) == segment
        return True

    def close(self) -> None:
        self.bench.close()
        self.program.close()


@pytest.fixture(scope="module")
def judge():
    judge = Judge()
    yield judge
    judge.close()


@settings(max_examples=400, deadline=None)
@given(segment=broken_segments())
def test_nothing_is_redirected_that_the_gate_would_hold_back(judge, segment):
    """Except for one thing: whether an event is valid JSON cannot be seen in the kernel."""
    if not judge.redirects(segment):
        return
    reader = LegReader(lambda event: None)
    safe = reader.feed(segment)
    assert (reader.finished, reader.done) == (0, False)
    if reader.bad is None:
        assert safe == len(segment)
    else:
        assert "JSON" in str(reader.bad)


@settings(max_examples=200, deadline=None)
@given(events=st.lists(plain_events, min_size=1, max_size=CHUNKS_MAX))
def test_whatever_is_plain_is_redirected(judge, events):
    segment = b"".join(events)
    assert judge.redirects(segment) == (len(segment) <= SEGMENT_MAX)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_bytes_out_are_bytes_in(tmp_path_factory, seed):
    """A stream of events, good and odd, in pieces that heed no boundary, to a reader in no hurry."""
    rng = random.Random(seed)
    events = [
        event(n, text="x" * rng.choice([0, 5, 80, 700, 3000]), finish=rng.choice([None] * 20 + ["stop"]))
        for n in range(rng.choice([3, 50, 400]))
    ]
    stream = b"".join(events)
    whole_events_s = rng.random()

    def pieces():
        position = 0
        ends = list(itertools.accumulate(map(len, events)))
        while position < len(stream):
            if rng.random() < whole_events_s:
                end = next(e for e in ends if e > position)
            else:
                end = position + rng.choice([1, 2, 7, 130, 1460, 9000, 65_536])
            yield stream[position:end]
            position = min(end, len(stream))

    async def run() -> None:
        engine = KernelEngine(flows_max=1)
        s = Stand(engine, tmp_path_factory.mktemp("fuzz"))
        if rng.random() < 0.5:
            s.client.setsockopt(1, 8, rng.choice([8192, 65_536]))  # SO_RCVBUF
        pumping = asyncio.ensure_future(s.pump())

        async def write() -> None:
            for piece in pieces():
                await s.send(piece)
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.choice([0, 0, 0, 0.0005]))
            s.node.close()

        writing = asyncio.ensure_future(write())
        received = b""
        while len(received) < len(stream):
            piece = await asyncio.get_running_loop().sock_recv(s.client, rng.choice([10, 5000, 65_536]))
            assert piece, "the client's stream ended early"
            received += piece
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        assert received == stream
        await writing
        assert await pumping is LegEnd.EOF
        assert s.flow.delivered == len(stream)
        assert s.slot.uncounted() == (stream if len(stream) <= 65_536 else b"")
        assert redirected(s.flow) <= len(stream)
        s.close()
        engine.close()

    asyncio.run(run())
