"""From a signal on the stream to a flipped node, over a real Valkey."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.steering import SignalThread, Steering
from kernel_steer.signals import Signal, publish
from tests.kernel_steer.harness import AdmissionDouble, Node

KEY = b"k" * 32


def signal(node: str = "a", epoch: int = 1) -> Signal:
    return Signal(node, epoch, "terminate", "aws", datetime.now(UTC))


@pytest.fixture
async def steering():
    return Steering(RelayEngine(), AdmissionDouble([]), asyncio.get_running_loop())


async def test_a_signal_flips_once(steering):
    steering.apply(signal())
    steering.apply(signal())
    steering.apply(signal(epoch=2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert steering._engine.stats.flips == 2
    assert [(flip.node, flip.epoch, flip.first_byte_at) for flip in steering._admission.flips] == [
        ("a", 1, None),
        ("a", 2, None),
    ]


async def test_the_next_answer_from_another_node_completes_the_report(steering):
    steering.apply(signal())
    steering.first_byte(Node("a", 1, "", 0))
    steering.first_byte(Node("b", 1, "", 0))
    steering.first_byte(Node("b", 1, "", 0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    flips = steering._admission.flips
    assert len(flips) == 2
    done = next(flip for flip in flips if flip.first_byte_at)
    assert done.signal_at <= done.flipped_at <= done.first_byte_at


async def test_over_the_stream(valkey_server, redis_client, steering):
    publish(redis_client, signal("forged"), b"another key")
    publish(redis_client, signal("a", 5), KEY)
    thread = SignalThread(valkey_server.url, KEY, steering)
    thread.start()
    async with asyncio.timeout(10):
        while not steering._admission.flips:
            await asyncio.sleep(0.005)
    thread.stop()
    await asyncio.to_thread(thread.join)
    assert steering._admission.draining == {"a"}
    assert steering._engine._flipped == {NodeKey("a", 5)}
