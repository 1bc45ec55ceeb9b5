"""What every engine promises. A new engine is added to ENGINES and has to pass as it is."""

from __future__ import annotations

import asyncio
import random
import socket
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_steer.engine.base import LegEnd, LegEnded, NodeFlipped, NodeKey
from kernel_steer.engine.kernel import KernelEngine
from kernel_steer.engine.relay import RelayEngine
from tests.kernel_steer.kernel_support import needs_kernel_engine
from tests.kernel_steer.stand import NODE, Stand, tcp_pair

ENGINES = {"relay": RelayEngine, "kernel": KernelEngine}

every_engine = pytest.mark.parametrize(
    "make_engine",
    [RelayEngine, pytest.param(KernelEngine, marks=needs_kernel_engine)],
    ids=["relay", "kernel"],
)


@pytest.fixture(params=["relay", pytest.param("kernel", marks=needs_kernel_engine)])
def engine(request):
    engine = ENGINES[request.param]()
    yield engine
    engine.close()


async def test_bytes_out_are_bytes_in(stand):
    s = stand(already_read=b"first ")
    pumping = asyncio.ensure_future(s.pump())
    await s.send(b"second")
    assert await s.receive(12) == b"first second"
    s.node.close()
    assert await pumping is LegEnd.EOF
    assert s.flow.delivered == 12
    assert s.slot.uncounted() == b"first second"


async def test_ipv6(stand):
    s = stand(family=socket.AF_INET6)
    pumping = asyncio.ensure_future(s.pump())
    await s.send(b"six")
    assert await s.receive(3) == b"six"
    s.node.close()
    assert await pumping is LegEnd.EOF


@every_engine
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), size=st.integers(1, 200_000))
def test_any_segmentation(tmp_path_factory, make_engine, seed, size):
    """Random pieces from one byte to 64 KB, a client that reads in random pieces."""

    async def run() -> None:
        rng = random.Random(seed)
        data = rng.randbytes(size)
        engine = make_engine()
        s = Stand(engine, tmp_path_factory.mktemp("conformance"))
        pumping = asyncio.ensure_future(s.pump())

        async def write() -> None:
            position = 0
            while position < len(data):
                step = rng.choice([1, 2, 7, 100, 1460, 20_000, 65_536])
                await s.send(data[position : position + step])
                position += step
                await asyncio.sleep(0)
            s.node.close()

        writing = asyncio.ensure_future(write())
        got = await s.receive(size)
        await writing
        assert await pumping is LegEnd.EOF
        assert got == data
        assert s.flow.delivered == size
        assert s.slot.uncounted() in (data, b"")  # a ring that was overrun says nothing rather than half
        s.close()
        engine.close()

    asyncio.run(run())


async def test_a_reset_of_the_node_does_not_touch_the_client(stand):
    s = stand()
    pumping = asyncio.ensure_future(s.pump())
    await s.send(b"abc")
    assert await s.receive(3) == b"abc"
    s.node.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.node.close()
    assert await pumping in (LegEnd.RESET, LegEnd.EOF)
    s.ours.send(b"still here")
    assert await s.receive(10) == b"still here"


async def test_silence_is_noticed(stand):
    s = stand()
    with pytest.raises(LegEnded) as caught:
        await s.flow.next(0.05)
    assert caught.value.reason is LegEnd.STALLED


async def test_a_client_that_leaves_is_noticed_while_the_node_is_silent(stand):
    s = stand()
    pumping = asyncio.ensure_future(s.pump())
    await asyncio.sleep(0)
    s.client.close()
    assert await asyncio.wait_for(pumping, 30) is LegEnd.CLIENT_GONE


async def test_pipelined_bytes_of_the_client_stay_in_its_socket(stand):
    s = stand()
    pumping = asyncio.ensure_future(s.pump())
    s.client.send(b"GET / HTTP/1.1\r\n\r\n")
    await s.send(b"answer")
    assert await s.receive(6) == b"answer"
    s.node.close()
    await pumping
    assert s.ours.recv(100) == b"GET / HTTP/1.1\r\n\r\n"


async def test_the_gate_holds_back(stand):
    """Bytes beyond the gate reach neither the client nor the journal."""
    allowed = 0
    s = stand(gate=lambda data: allowed)
    pumping = asyncio.ensure_future(s.pump())
    await s.send(b"held")
    allowed = 2
    await s.send(b"!")
    assert await s.receive(2) == b"he"
    s.node.close()
    assert await pumping is LegEnd.EOF
    assert s.flow.delivered == 2
    assert s.slot.uncounted() == b"he"


async def test_after_a_fence_nothing_more_arrives(stand):
    s = stand()
    await s.send(b"before")
    await s.flow.next(2)
    assert s.flow.fence() == 6
    assert s.flow.fence() == 6
    with pytest.raises(OSError):
        for _ in range(100):
            s.node.send(b"late")
            await asyncio.sleep(0)
    with pytest.raises(LegEnded):
        await s.flow.next(0.05)
    s.ours.send(b"|next")
    assert await s.receive(11) == b"before|next"


async def test_a_flip_lets_open_flows_live_and_refuses_new_ones(stand, engine):
    s = stand()
    pumping = asyncio.ensure_future(s.pump())
    assert engine.flip(NODE) == 1
    assert engine.flip(NODE) == 1
    await s.send(b"goes on")
    assert await s.receive(7) == b"goes on"
    near, far = tcp_pair()
    with pytest.raises(NodeFlipped):
        engine.open_flow(watch=s.watch, backend=near, node=NODE, slot=s.slot, gate=lambda data: 0)
    assert near.fileno() == -1
    far.close()
    s.node.close()
    await pumping
    s.flow.close()
    assert engine.flip(NODE) == 0
    assert engine.flip(NodeKey("a", 2)) == 0
    assert (engine.stats.flips, engine.stats.flows_open, engine.stats.flows_total) == (2, 0, 1)


async def test_a_restored_node_takes_flows_again(stand, engine):
    engine.flip(NODE)
    engine.restore(NODE)
    s = stand()
    pumping = asyncio.ensure_future(s.pump())
    await s.send(b"back")
    assert await s.receive(4) == b"back"
    s.node.close()
    await pumping
    engine.flip(NODE)
    near, far = tcp_pair()
    with pytest.raises(NodeFlipped):
        engine.open_flow(watch=s.watch, backend=near, node=NODE, slot=s.slot, gate=lambda data: 0)
    far.close()
