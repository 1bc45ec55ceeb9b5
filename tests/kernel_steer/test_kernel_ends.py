"""Nodes and clients that end, reset, fall silent or do not read; and the fence. Each rule costs data where it is broken."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import struct

import pytest

from kernel_steer.engine.base import LegEnd, LegEnded
from kernel_steer.engine.kernel import tcp
from kernel_steer.engine.kernel.lane import UNACKED_MAX
from kernel_steer.engine.kernel.layout import RING_BYTES
from kernel_steer.engine.relay import RelayFlow
from kernel_steer.engine.wake import ClientWatch
from tests.kernel_steer.kernel_support import (
    event,
    needs_kernel_engine,
    passed,
    peek,
    redirected,
    spliced,
    tcp_pair,
    until,
)
from tests.kernel_steer.stand import NODE, Stand

pytestmark = needs_kernel_engine


# --- ends of the node ---------------------------------------------------------------------------------


async def test_a_bare_fin_leaves_the_client_for_the_next_node(stand, engine, tmp_path):
    s = stand()
    pumping, _ = await spliced(s)
    s.node.close()
    assert await pumping is LegEnd.EOF
    s.flow.fence()
    second = Stand.__new__(Stand)
    second.__dict__.update(s.__dict__)
    second.node, backend = tcp_pair()
    for sock in (second.node, backend):
        sock.setblocking(False)
    s.slot.start_leg(2)
    second.seen = 0
    second.flow = engine.open_flow(
        watch=s.watch, backend=backend, node=NODE, slot=s.slot, gate=second._pass_all
    )
    pumping, more = await spliced(second)
    assert more
    second.node.close()
    assert await pumping is LegEnd.EOF
    assert second.flow.delivered == len(more)
    second.flow.close()


async def test_a_fin_on_data(stand):
    s = stand()
    pumping, _ = await spliced(s)
    s.node.send(event(1), socket.MSG_MORE)
    s.node.shutdown(socket.SHUT_WR)
    assert await s.receive(len(event(1))) == event(1)
    assert await pumping is LegEnd.EOF


async def test_a_reset_after_redirected_bytes(stand):
    s = stand()
    pumping, got = await spliced(s)
    await s.send(event(1))
    assert await s.receive(len(event(1))) == event(1)
    s.node.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.node.close()
    assert await pumping in (LegEnd.RESET, LegEnd.EOF)
    assert s.flow.delivered == len(got) + len(event(1))
    s.ours.send(b"still here")
    assert await s.receive(10) == b"still here"


async def test_a_half_closed_node_still_gets_what_is_sent_to_it(stand):
    s = stand()
    pumping, _ = await spliced(s)
    s.node.shutdown(socket.SHUT_WR)
    assert await pumping is LegEnd.EOF
    s.backend.send(b"to the node")
    await until(lambda: peek(s.node) == b"to the node")


async def test_a_node_that_closed_before_the_flow_began_is_relayed(engine, tmp_path):
    node, backend = tcp_pair()
    backend.setblocking(False)
    node.send(event(0))
    node.close()
    await until(lambda: peek(backend) != b"")
    near, _client = tcp_pair()
    near.setblocking(False)
    s = Stand(engine, tmp_path)
    flow = engine.open_flow(
        watch=ClientWatch(near), backend=backend, node=NODE, slot=s.slot, gate=s._pass_all
    )
    assert type(flow) is RelayFlow
    await flow.next(2)
    with pytest.raises(LegEnded, match="eof"):
        await flow.next(2)
    assert flow.delivered == len(event(0))
    flow.close()
    s.close()


async def test_what_was_queued_before_comes_first_and_once(engine, tmp_path):
    """Bytes that arrived with the head, more that nobody has read, then live ones."""
    s = Stand(engine, tmp_path)
    s.flow.close()
    s.slot.start_leg(1)
    s.node, s.backend = tcp_pair()
    for sock in (s.node, s.backend):
        sock.setblocking(False)
    queued = b"".join(event(n) for n in range(20))
    s.node.send(queued)
    await until(lambda: peek(s.backend) != b"")
    read = s.backend.recv(333)  # in the middle of a segment
    s.seen = 0
    s.flow = engine.open_flow(
        watch=s.watch, backend=s.backend, node=NODE, slot=s.slot, gate=s._pass_all, already_read=read
    )
    pumping = asyncio.ensure_future(s.pump())
    assert await s.receive(len(queued)) == queued
    await s.send(event(99))
    assert await s.receive(len(event(99))) == event(99)
    s.node.close()
    assert await pumping is LegEnd.EOF
    assert s.flow.delivered == len(queued + event(99))
    s.close()


# --- clients ------------------------------------------------------------------------------------------


async def test_a_client_that_never_reads_costs_a_bounded_amount(stand):
    s = stand()
    s.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    for sock in (s.node, s.backend):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
    pumping, got = await spliced(s)
    sent = b""
    held_up = 0
    while held_up < 20:
        try:
            sent += event(len(sent))[: s.node.send(event(len(sent)))]
            held_up = 0
        except BlockingIOError:
            held_up += 1
            await asyncio.sleep(0.01)  # for the gateway to take more, if it wants any
        assert len(sent) < 2_000_000, "nothing holds the node up"
    # A peer's window that was offered and filled, and what may wait for the next one.
    assert tcp.progress(s.ours).unacked < 65_536 + 4 * UNACKED_MAX + 2 * RING_BYTES
    assert redirected(s.flow) - s.flow._mirrored <= RING_BYTES
    assert await s.receive(len(sent)) == sent, "bytes of a slow client were lost or doubled"
    s.node.close()
    assert await pumping is LegEnd.EOF
    assert s.flow.delivered == len(got) + len(sent)


async def test_a_slow_reader_gets_everything_in_order(stand):
    s = stand()
    s.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    pumping, got = await spliced(s)
    rng = random.Random(5)
    sent = b"".join(event(n) for n in range(1000))

    async def write() -> None:
        for n in range(1000):
            await s.send(event(n))
            if n % 7 == 0:
                await asyncio.sleep(0)

    writing = asyncio.ensure_future(write())
    received = b""
    while len(received) < len(sent):
        received += await asyncio.get_running_loop().sock_recv(s.client, rng.choice([1, 100, 3000]))
        if rng.random() < 0.01:
            await asyncio.sleep(0.002)
    await writing
    assert received == sent
    s.node.close()
    assert await pumping is LegEnd.EOF
    assert s.flow.delivered == len(got) + len(sent)


async def test_a_client_that_resets_in_mid_stream(stand):
    s = stand()
    pumping, _ = await spliced(s)
    s.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.client.close()
    assert await pumping is LegEnd.CLIENT_GONE
    s.flow.fence()
    assert s.flow.delivered <= s.slot.written


async def test_a_client_with_a_pipelined_request_that_leaves_is_noticed(stand):
    """Its end cannot be peeked any more, and in the kernel's way nobody writes who would be told."""
    s = stand()
    pumping, _ = await spliced(s)
    s.client.send(b"next request")
    await until(lambda: peek(s.ours) == b"next request")
    s.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.client.close()
    with pytest.raises(OSError):
        for n in range(1000):
            await s.send(event(n))
            if pumping.done():
                s.flow.fence()
            await asyncio.sleep(0)
    assert await pumping is LegEnd.CLIENT_GONE


async def test_a_client_that_its_owner_closed_is_gone(stand):
    s = stand()
    pumping, got = await spliced(s)
    s.watch.stop()
    s.ours.close()
    s.node.send(event(1, finish="stop"))
    assert await pumping is LegEnd.CLIENT_GONE
    assert s.flow.fence() == len(got)


async def test_closing_with_a_backlog_keeps_what_was_counted(stand):
    """The client's socket is closed right after the fence: every byte that was counted still arrives."""
    s = stand()
    pumping, got = await spliced(s)
    count = 0
    for n in range(100):
        s.node.send(event(n))
        count += len(event(n))
    await until(lambda: redirected(s.flow) + passed(s.flow) >= len(got) + count)
    delivered = s.flow.fence()
    s.watch.stop()
    s.ours.close()
    pumping.cancel()
    rest = b""
    while piece := await asyncio.get_running_loop().sock_recv(s.client, 65536):
        rest += piece
    assert len(got) + len(rest) == delivered


# --- fence --------------------------------------------------------------------------------------------


async def test_a_fence_in_full_flow_is_exact(stand):
    for _ in range(10):
        s = stand()
        pumping, got = await spliced(s)
        stop = asyncio.Event()

        async def write(s=s, stop=stop) -> None:
            n = 0
            while not stop.is_set():
                try:
                    s.node.send(event(n))
                except (BlockingIOError, OSError) as error:
                    if error.errno not in (errno.EAGAIN, errno.EPIPE, errno.ECONNRESET):
                        raise
                n += 1
                if n % 20 == 0:
                    await asyncio.sleep(0)

        writing = asyncio.ensure_future(write())
        await until(lambda s=s: redirected(s.flow) > 3000)
        delivered = s.flow.fence()
        s.ours.send(b"|next")
        stop.set()
        await writing
        rest = await s.receive(delivered - len(got) + 5)
        assert rest.endswith(b"|next")
        assert rest.count(b"|next") == 1
        assert len(got) + len(rest) == delivered + 5
        assert s.slot._between(s.slot.delivered - 2000, s.slot.delivered) == (got + rest)[-2005:-5]
        pumping.cancel()


async def test_a_retransmission_that_overlaps_ends_the_leg(stand):
    """The kernel hands such a segment over whole; its first bytes would be said twice."""
    s = stand()
    pumping, got = await spliced(s)
    _inject(s.node, s.backend, back=10, data=got[-10:] + event(1))
    assert await pumping is LegEnd.BAD
    delivered = s.flow.fence()
    assert delivered == len(got)
    s.ours.send(b"!")
    assert await s.receive(1) == b"!"


def _inject(node: socket.socket, backend: socket.socket, *, back: int, data: bytes) -> None:
    """Sends a TCP segment as the node's, beginning `back` bytes before what was sent last."""
    tcp_repair, repair_queue, queue_seq = 19, 20, 21
    node.setsockopt(socket.IPPROTO_TCP, tcp_repair, 1)
    node.setsockopt(socket.IPPROTO_TCP, repair_queue, 2)
    sequence = node.getsockopt(socket.IPPROTO_TCP, queue_seq) & 0xFFFFFFFF
    node.setsockopt(socket.IPPROTO_TCP, repair_queue, 1)
    acknowledged = node.getsockopt(socket.IPPROTO_TCP, queue_seq) & 0xFFFFFFFF
    node.setsockopt(socket.IPPROTO_TCP, tcp_repair, -1)
    source, target = node.getsockname(), backend.getsockname()
    header = struct.pack(
        ">HHIIBBHHH",
        source[1], target[1], (sequence - back) & 0xFFFFFFFF, acknowledged, 5 << 4, 0x18, 512, 0, 0,
    )  # fmt: skip
    pseudo = (
        socket.inet_aton(source[0]) + socket.inet_aton(target[0]) + struct.pack(">BBH", 0, 6, 20 + len(data))
    )
    packet = pseudo + header + data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(packet) // 2}H", packet))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as raw:
        raw.sendto(header[:16] + struct.pack(">H", checksum) + header[18:] + data, (target[0], 0))
