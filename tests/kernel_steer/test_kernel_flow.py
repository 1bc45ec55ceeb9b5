"""What the kernel forwards, what it leaves to user space, and how both stay in order."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
import uvloop

from kernel_steer.engine.base import LegEnd, LegEnded
from kernel_steer.engine.kernel import KernelEngine
from kernel_steer.engine.kernel.layout import RING_BYTES, SEGMENT_MAX
from kernel_steer.engine.relay import RelayFlow
from kernel_steer.engine.wake import ClientWatch
from kernel_steer.resume.reader import LegReader
from tests.kernel_steer.kernel_support import (
    event,
    needs_kernel_engine,
    passed,
    redirected,
    spliced,
    tcp_pair,
    until,
)
from tests.kernel_steer.stand import NODE, Stand

pytestmark = needs_kernel_engine


async def test_plain_events_bypass_user_space(stand):
    s = stand()
    pumping, got = await spliced(s)
    sent = got
    for n in range(300):
        await s.send(event(n))
        sent += event(n)
        got += await s.receive(len(event(n)))
    assert got == sent
    # As many events in no time are more than the client acknowledges in that time: a few go the long way.
    assert redirected(s.flow) > 10 * passed(s.flow)
    s.node.close()
    assert await pumping is LegEnd.EOF
    assert s.flow.delivered == len(sent)
    assert s.slot.uncounted() == sent


async def test_the_first_bytes_go_through_user_space(stand):
    """Whoever waits for an answer's first byte is told at once."""
    s = stand()
    await s.send(event(0))
    await s.flow.next(2)
    assert s.flow.delivered == len(event(0))
    assert redirected(s.flow) == 0


@pytest.mark.parametrize(
    "odd",
    [
        event(1, finish="stop"),
        event(1, finish="abort"),
        event(0) + event(1, finish="abort"),
        b"f\r\ndata: [DONE]\n\n\r\n",
        b"0\r\n\r\n",
        event(0) + b"0\r\n\r\n",
        b'1f\r\ndata: {"error": {"code": 500}}\n\n\r\n',
        b"8\r\n: ping\n\n\r\n",
        event(0)[:-2],  # its chunk goes on in the next segment
        event(0)[1:],
        event(0)[:60] + b"\n\n" + event(0)[60:],
        b"zz" + event(0)[2:],
        b"\x15" + event(0)[1:],  # not a digit, though its low bits are
        event(0, text="finish_reason"),
        event(0, text="x" * SEGMENT_MAX),
        b"".join(event(n) for n in range(9)),
        json.dumps({"choices": []}).encode(),
        b"\n",
    ],
    ids=range(18),
)
async def test_what_is_not_plain_is_judged_by_user_space(stand, odd):
    s = stand()
    pumping, got = await spliced(s)
    short_way, long_way = redirected(s.flow), passed(s.flow)
    await s.send(odd)
    got = await s.receive(len(odd))
    assert got == odd
    assert (redirected(s.flow), passed(s.flow)) == (short_way, long_way + len(odd))
    s.node.close()
    await pumping


@pytest.mark.parametrize(
    "text", ["plain", '漢字 😀 \\ " \n\r\t', '"error"', '"error": {', '"finish_', "[DONE]", ""]
)
async def test_a_models_words_do_not_matter(stand, text):
    s = stand()
    pumping, _ = await spliced(s)
    short_way = redirected(s.flow)
    await s.send(event(7, text=text))
    assert await s.receive(len(event(7, text=text))) == event(7, text=text)
    assert redirected(s.flow) == short_way + len(event(7, text=text))
    s.node.close()
    await pumping


async def test_several_chunks_in_one_segment(stand):
    s = stand()
    pumping, _ = await spliced(s)
    short_way = redirected(s.flow)
    several = event(1) + event(2) + event(3, text="")
    await s.send(several)
    assert await s.receive(len(several)) == several
    assert redirected(s.flow) == short_way + len(several)
    s.node.close()
    await pumping


async def test_a_chunk_over_two_segments(stand):
    s = stand()
    pumping, _ = await spliced(s)
    whole = event(5)
    for cut in range(1, len(whole)):
        await s.send(whole[:cut])
        await until(lambda: s.flow._lane.passed == s.flow._read_count)
        await s.send(whole[cut:])
        assert await s.receive(len(whole)) == whole
    short_way = redirected(s.flow)
    await s.send(event(6))
    assert await s.receive(len(event(6))) == event(6)
    assert redirected(s.flow) > short_way, "after a cut chunk the kernel does not take over again"
    s.node.close()
    await pumping


async def test_bytes_one_by_one_and_64_kb_at_once(stand):
    s = stand()
    pumping, _ = await spliced(s)
    for byte in event(1):
        await s.send(bytes([byte]))
    assert await s.receive(len(event(1))) == event(1)
    large = event(2, text="y" * 65_000)
    await s.send(large)
    assert await s.receive(len(large)) == large
    s.node.close()
    assert await pumping is LegEnd.EOF


async def test_the_ring_wraps(stand):
    """Ten times around, and what was delivered can always be read back."""
    s = stand()
    pumping, got = await spliced(s)
    sent = got
    n = 0
    while redirected(s.flow) < 10 * RING_BYTES:
        n += 1
        await s.send(event(n, text="w" * (n % 90)))
        sent += event(n, text="w" * (n % 90))
        got += await s.receive(len(sent) - len(got))
    assert got == sent
    s.node.close()
    assert await pumping is LegEnd.EOF
    assert s.flow.delivered == len(sent)
    assert s.slot._between(s.slot.written - 65_536, s.slot.written) == sent[-65_536:]


# --- silence and the engine ---------------------------------------------------------------------------


async def test_silence_is_measured_from_the_last_redirected_byte(stand):
    """The clock first finds that something came; then it runs from when that was."""
    s = stand()
    await s.send(event(0))
    await s.flow.next(2)
    sleeping = asyncio.ensure_future(s.flow.next(0.3))
    await until(lambda: s.flow._sleeper is not None)
    await s.send(event(1))
    assert await s.receive(len(event(0) + event(1))) == event(0) + event(1)
    assert redirected(s.flow) == len(event(1))
    came_at = s.flow._lane.last_redirect_s
    await sleeping
    with pytest.raises(LegEnded) as caught:
        await s.flow.next(0.3)
    assert caught.value.reason is LegEnd.STALLED
    assert time.monotonic() - came_at >= 0.3
    assert s.flow.delivered == len(event(0) + event(1))


async def test_a_flip_lets_user_space_see_each_event_again(stand, engine):
    """So that the answer can be moved at a token. A flip taken back gives the way to the kernel again."""
    s = stand()
    pumping, _ = await spliced(s)
    assert engine.flip(NODE) == 1
    short_way = redirected(s.flow)
    for n in range(5):
        await s.send(event(n))
        assert await s.receive(len(event(n))) == event(n)
    assert redirected(s.flow) == short_way
    engine.restore(NODE)
    await s.send(event(5))
    await s.receive(len(event(5)))
    await until(lambda: s.flow._sleeper is not None)
    await s.send(event(6))
    assert await s.receive(len(event(6))) == event(6)
    assert redirected(s.flow) > short_way
    s.node.close()
    assert await pumping is LegEnd.EOF


async def test_a_gate_that_refuses_what_was_redirected_ends_the_leg(stand):
    reader = LegReader(lambda event: None)
    s = stand(gate=reader.feed)
    pumping, _ = await spliced(s)
    bad = event(1)
    bad = bad[: bad.index(b'"id"')] + b'"id";' + bad[bad.index(b'"id"') + 5 :]
    await s.send(bad)
    assert await s.receive(len(bad)) == bad
    s.node.close()
    assert await pumping is LegEnd.BAD
    assert reader.bad is not None


async def test_ipv6_takes_the_short_way_too(stand):
    s = stand(family=socket.AF_INET6)
    pumping, _ = await spliced(s)
    s.node.close()
    assert await pumping is LegEnd.EOF


def test_the_gateways_event_loop_wakes_it(tmp_path):
    """uvloop has its own way of watching descriptors."""

    async def carry() -> None:
        engine = KernelEngine(flows_max=2)
        s = Stand(engine, tmp_path)
        pumping, got = await spliced(s)
        sent = b""
        for n in range(200):
            await s.send(event(n))
            sent += event(n)
        assert await s.receive(len(sent)) == sent
        s.node.close()
        assert await pumping is LegEnd.EOF
        assert s.flow.delivered == len(got + sent)
        s.close()
        engine.close()

    uvloop.run(carry())


async def test_many_flows_at_once(tmp_path):
    engine = KernelEngine(flows_max=100)
    stands = [Stand(engine, tmp_path / str(n)) for n in range(100)]
    pumping = [asyncio.ensure_future(s.pump()) for s in stands]
    for n in range(20):
        for number, s in enumerate(stands):
            await s.send(event(1000 * n + number))
        for number, s in enumerate(stands):
            assert await s.receive(len(event(1000 * n + number))) == event(1000 * n + number)
    assert sum(redirected(s.flow) for s in stands) > sum(passed(s.flow) for s in stands)
    for s in stands:
        s.node.close()
    assert set(await asyncio.gather(*pumping)) == {LegEnd.EOF}
    for s in stands:
        s.close()
    assert engine.stats.flows_open == 0
    engine.close()


async def test_more_flows_than_slots(engine, stand):
    stands = [stand() for _ in range(10)]
    kinds = [type(s.flow) for s in stands]
    assert kinds.count(RelayFlow) == 2
    for s in stands:
        pumping = asyncio.ensure_future(s.pump())
        await s.send(event(1))
        assert await s.receive(len(event(1))) == event(1)
        s.node.close()
        assert await pumping is LegEnd.EOF
        s.flow.close()
    assert engine.stats.flows_open == 0
    again = stand()
    assert type(again.flow) is not RelayFlow


async def test_one_client_has_many_answers(engine, stand):
    s = stand()
    for leg in range(1, 30):
        pumping, got = await spliced(s)
        s.node.close()
        assert await pumping is LegEnd.EOF
        assert s.flow.delivered == len(got)
        s.flow.close()
        s.node, s.backend = tcp_pair()
        for sock in (s.node, s.backend):
            sock.setblocking(False)
        s.slot.start_leg(leg + 1)
        s.seen = 0
        s.flow = engine.open_flow(watch=s.watch, backend=s.backend, node=NODE, slot=s.slot, gate=s._pass_all)


async def test_a_unix_socket_is_relayed(engine, tmp_path):
    s = Stand(engine, tmp_path)
    ours, client = socket.socketpair()
    node, backend = socket.socketpair()
    for sock in (ours, client, node, backend):
        sock.setblocking(False)
    watch = ClientWatch(ours)
    flow = engine.open_flow(watch=watch, backend=backend, node=NODE, slot=s.slot, gate=s._pass_all)
    assert type(flow) is RelayFlow
    node.send(event(0))
    await flow.next(2)
    assert client.recv(1000) == event(0)
    watch.stop()
    flow.close()
    for sock in (ours, client, node):
        sock.close()
    s.close()
