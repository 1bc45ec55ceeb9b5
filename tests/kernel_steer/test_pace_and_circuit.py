"""When a silent node is given up, and when a failing one is left alone by everybody."""

from __future__ import annotations

import pytest

from kernel_steer.resume.circuit import MEMORY_S, PAUSE_S, Circuits
from kernel_steer.resume.pace import Pace
from kernel_steer.resume.work import Limits

LIMITS = Limits(head_s=120, token_gap_s=20, gap_factor=5, gap_floor_s=2)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pace(clock):
    return Pace(LIMITS, clock)


def say(pace: Pace, clock: Clock, gaps_s: list[float], tokens: int = 1) -> None:
    for gap_s in gaps_s:
        clock.now += gap_s
        pace.note(tokens)


class TestPace:
    def test_a_prompt_may_take_its_time(self, pace, clock):
        clock.now += 30
        assert pace.silence_max_s == 120

    def test_without_a_rhythm_there_is_a_fixed_time(self, pace, clock):
        say(pace, clock, [30, 0.1, 0.1])
        assert pace.silence_max_s == 20

    def test_a_fast_stream_is_given_up_after_the_floor(self, pace, clock):
        say(pace, clock, [9] + [0.02] * 50)
        assert pace.silence_max_s == 2

    def test_a_slow_one_has_five_times_its_longest_gap(self, pace, clock):
        say(pace, clock, [1] + [0.3] * 20 + [1.5] + [0.3] * 20)
        assert pace.silence_max_s == pytest.approx(7.5)

    def test_a_hiccup_is_forgotten(self, pace, clock):
        say(pace, clock, [1, 3.0] + [0.1] * 250)
        assert pace.silence_max_s == 2

    def test_tokens_that_come_together_share_their_gap(self, pace, clock):
        say(pace, clock, [4.0] * 4, tokens=40)
        assert pace.silence_max_s == 2

    def test_never_longer_than_a_prefill(self, pace, clock):
        say(pace, clock, [50.0] * 20)
        assert pace.silence_max_s == 120


@pytest.fixture
def circuits(clock):
    return Circuits(clock)


class TestCircuit:
    def test_one_customer_cannot_open_it(self, circuits):
        assert not any(circuits.failed("a", 1, "mallory") for _ in range(100))
        assert not circuits.closed_to("a", 1)
        assert circuits.open_nodes == []

    def test_failures_of_two_customers_open_it(self, circuits):
        assert not circuits.failed("a", 1, "one")
        assert circuits.failed("a", 1, "two")
        assert circuits.closed_to("a", 1)
        assert not circuits.closed_to("a", 2), "another incarnation is another node"
        assert not circuits.closed_to("b", 1)
        assert (circuits.open_nodes, circuits.opened) == (["a"], 1)

    def test_a_success_in_between_clears_it(self, circuits):
        circuits.failed("a", 1, "one")
        circuits.worked("a", 1)
        assert not circuits.failed("a", 1, "two")

    def test_old_failures_do_not_count(self, circuits, clock):
        circuits.failed("a", 1, "one")
        clock.now += MEMORY_S
        assert not circuits.failed("a", 1, "two")

    def test_nobody_at_the_address_opens_it_at_once(self, circuits):
        assert circuits.failed("a", 1, "one", unreachable=True)

    def test_half_open_lets_one_through(self, circuits, clock):
        circuits.failed("a", 1, "one", unreachable=True)
        clock.now += PAUSE_S
        assert not circuits.closed_to("a", 1)
        circuits.begin("a", 1)
        assert circuits.closed_to("a", 1)
        circuits.worked("a", 1)
        assert not circuits.closed_to("a", 1)

    def test_a_failed_try_doubles_the_pause_whoever_made_it(self, circuits, clock):
        circuits.failed("a", 1, "one", unreachable=True)
        clock.now += PAUSE_S
        circuits.begin("a", 1)
        assert circuits.failed("a", 1, "one")
        clock.now += PAUSE_S
        assert circuits.closed_to("a", 1)
        clock.now += PAUSE_S
        assert not circuits.closed_to("a", 1)

    def test_a_try_without_a_verdict_leaves_the_next_one(self, circuits, clock):
        circuits.failed("a", 1, "one", unreachable=True)
        clock.now += PAUSE_S
        circuits.begin("a", 1)
        circuits.ended("a", 1)
        assert not circuits.closed_to("a", 1)
