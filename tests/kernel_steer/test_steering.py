"""From a signal to a flipped node: what is believed, what is news, and what comes back."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.moves import Moves
from kernel_steer.gateway.signal_path import SignalThread
from kernel_steer.gateway.steering import DATAGRAM, STREAM, Steering
from kernel_steer.signals import CANCEL, Signal, publish
from tests.kernel_steer.harness import AdmissionDouble, Node

KEY = b"k" * 32
START = datetime(2026, 12, 1, 10, tzinfo=UTC)


def signal(
    node: str = "a", epoch: int = 1, action: str = "terminate", source: str = "aws", at: int = 0
) -> Signal:
    """`at` is in seconds and orders the words of a source."""
    return Signal(node, epoch, action, source, START + timedelta(seconds=at))


def cancel(**changes: object) -> Signal:
    return signal(action=CANCEL, **({"at": 1} | changes))  # type: ignore[arg-type]


@pytest.fixture
async def steering():
    yield Steering(RelayEngine(), AdmissionDouble([]), asyncio.get_running_loop())
    await asyncio.sleep(0.01)  # reports that are under way


def is_away(steering: Steering, node: str = "a", epoch: int = 1) -> bool:
    flipped = NodeKey(node, epoch) in steering._engine._flipped
    assert flipped == (node in steering._admission.draining)
    return flipped


async def test_a_signal_flips_once(steering):
    steering.apply(signal(), DATAGRAM)
    steering.apply(signal(), STREAM)
    steering.apply(signal(epoch=2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert steering._engine.stats.flips == 2
    assert [(flip.node, flip.epoch, flip.first_byte_at) for flip in steering._admission.flips] == [
        ("a", 1, None),
        ("a", 2, None),
    ]


async def test_it_is_counted_which_carrier_was_first(steering):
    steering.apply(signal(), DATAGRAM)
    steering.apply(signal(), STREAM)
    steering.apply(signal("b"), STREAM)
    assert steering.stats.heard == {DATAGRAM: 1, STREAM: 2}
    assert steering.stats.first == {DATAGRAM: 1, STREAM: 1}
    assert (steering.stats.flips, steering.stats.duplicates) == (2, 1)
    assert not steering.stats.refused


async def test_the_next_answer_from_another_node_completes_the_report(steering):
    sent = signal(at=0)
    steering.apply(sent)
    steering.first_byte(Node("a", 1, "", 0))
    steering.first_byte(Node("b", 1, "", 0))
    steering.first_byte(Node("b", 1, "", 0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    flips = steering._admission.flips
    assert len(flips) == 2
    done = next(flip for flip in flips if flip.first_byte_at)
    assert done.signal_at == sent.signal_at
    assert done.flipped_at <= done.first_byte_at


# --- cancelled -----------------------------------------------------------------------------------------


async def test_a_cancelled_notice_flips_back_and_a_new_one_flips_again(steering):
    steering.apply(signal())
    assert is_away(steering)
    steering.apply(cancel(at=1))
    assert not is_away(steering)
    steering.apply(signal(at=2))
    assert is_away(steering)
    assert (steering.stats.flips, steering.stats.restores) == (2, 1)


async def test_a_node_that_two_sources_take_stays_away_until_both_take_it_back(steering):
    steering.apply(signal(source="azure"))
    steering.apply(signal(source="sigterm", at=5))
    steering.apply(cancel(source="azure", at=6))
    assert is_away(steering)
    steering.apply(cancel(source="sigterm", at=7))
    assert not is_away(steering)


async def test_a_cancellation_that_overtakes_its_notice_has_the_last_word(steering):
    steering.apply(cancel(at=1), DATAGRAM)
    steering.apply(signal(at=0), STREAM)
    assert not is_away(steering)


async def test_a_flip_that_was_taken_back_is_not_reported_as_completed(steering):
    steering.apply(signal())
    steering.apply(cancel())
    steering.first_byte(Node("b", 1, "", 0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [flip.first_byte_at for flip in steering._admission.flips] == [None]


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_on_two_carriers_ends_with_the_newest_word(steering, seed):
    words = [signal(at=0), cancel(at=1), signal(at=2), cancel(at=3), signal(at=4)][: 2 + seed % 4]
    arrivals = list(itertools.product(words, [DATAGRAM, STREAM]))
    random.Random(seed).shuffle(arrivals)
    for word, carrier in arrivals:
        steering.apply(word, carrier)
    assert is_away(steering) == (not words[-1].is_cancel)


# --- when answers leave --------------------------------------------------------------------------------


class RecordingMoves(Moves):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[datetime | str | None] = []

    def leaving(self, node: NodeKey, deadline: datetime | None) -> None:
        self.said.append(deadline)

    def staying(self, node: NodeKey) -> None:
        self.said.append("stays")


async def test_answers_leave_by_the_earliest_deadline_of_all_who_take_the_node():
    moves = RecordingMoves()
    steering = Steering(RelayEngine(), AdmissionDouble([]), asyncio.get_running_loop(), moves)
    soon, late = (START + timedelta(minutes=minutes) for minutes in (2, 9))
    steering.apply(replace(signal(source="aws"), deadline=late))
    steering.apply(replace(signal(source="mesh"), deadline=soon))
    steering.apply(signal(source="sigterm"))  # at any moment
    for source in ("sigterm", "mesh", "aws"):
        steering.apply(cancel(source=source, at=9))
    await asyncio.sleep(0.01)
    assert moves.said == [late, soon, None, soon, late, "stays"]


# --- refused -------------------------------------------------------------------------------------------


async def test_a_signal_about_an_unknown_node_is_refused(steering):
    steering._admission.unknown.add("nobody")
    steering.apply(signal("nobody"), DATAGRAM)
    assert steering.stats.refused == {("unknown_node", DATAGRAM): 1}
    assert steering.stats.flips == 0


async def test_a_signal_about_a_past_incarnation_is_refused(steering):
    steering.apply(signal(epoch=8))
    steering.apply(signal(epoch=7), DATAGRAM)
    assert steering.stats.refused == {("replayed", DATAGRAM): 1}
    assert NodeKey("a", 7) not in steering._engine._flipped


async def test_a_replayed_notice_does_not_undo_its_cancellation(steering):
    steering.apply(signal(), DATAGRAM)
    steering.apply(cancel(), DATAGRAM)
    steering.apply(signal(), DATAGRAM)
    assert not is_away(steering)
    assert steering.stats.refused == {("replayed", DATAGRAM): 1}


async def test_the_late_copy_on_the_slow_carrier_is_no_replay(steering):
    for word in (signal(), cancel()):
        steering.apply(word, DATAGRAM)
    for word in (signal(), cancel()):
        steering.apply(word, STREAM)
    assert not is_away(steering)
    assert not steering.stats.refused


# --- over the stream -----------------------------------------------------------------------------------


async def test_over_the_stream(valkey_server, redis_client, steering):
    now = datetime.now(UTC)
    publish(redis_client, Signal("forged", 1, "terminate", "aws", now), b"another key")
    publish(redis_client, Signal("a", 5, "terminate", "aws", now), KEY)
    thread = SignalThread(valkey_server.url, KEY, steering)
    thread.start()
    async with asyncio.timeout(30):
        while not steering._admission.flips:
            await asyncio.sleep(0.005)
    thread.stop()
    await asyncio.to_thread(thread.join)
    assert steering._admission.draining == {"a"}
    assert steering._engine._flipped == {NodeKey("a", 5)}
    assert steering.stats.refused == {("forged", STREAM): 1}


async def test_an_engine_that_fails_once_does_not_make_the_gateway_deaf(
    valkey_server, redis_client, steering
):
    flip = steering._engine.flip

    def fail_for_a(node: NodeKey) -> int:
        if node.name == "a":
            raise OSError("no such map")
        return flip(node)

    steering._engine.flip = fail_for_a
    for node in ("a", "b"):
        publish(redis_client, Signal(node, 5, "terminate", "aws", datetime.now(UTC)), KEY)
    thread = SignalThread(valkey_server.url, KEY, steering)
    thread.start()
    async with asyncio.timeout(30):
        while not steering._admission.flips:
            await asyncio.sleep(0.005)
    thread.stop()
    await asyncio.to_thread(thread.join)
    assert steering._engine._flipped == {NodeKey("b", 5)}
