"""Which node gets the next leg."""

from collections import Counter
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerage.admission.hazard import Experience, expected_cost, hazard
from brokerage.admission.placement import AFFINITY_PREMIUM, FAILURE_PAUSE_S, Placement
from brokerage.admission.snapshot import ReadyNode
from brokerage.models import EvictionNotice
from brokerage.models import Node as NodeRow
from kernel_steer.admission import Node
from tests.brokerage import factories
from tests.brokerage.broker import eventually, orm

NOBODY: frozenset[str] = frozenset()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ready(name: str, *, epoch: int = 1, slots: int = 4, rate: str = "0", silent: bool = False) -> ReadyNode:
    return ReadyNode(Node(name=name, epoch=epoch, host="127.0.0.1", port=9000), slots, float(rate), silent)


def placement(*nodes: ReadyNode) -> tuple[Placement, Clock]:
    clock = Clock()
    board = Placement(clock)
    board.update({"m": nodes})
    return board, clock


def chosen(board: Placement, exclude: frozenset[str] = NOBODY) -> str | None:
    node = board.choose("m", exclude)
    return node and node.name


def test_equal_nodes_take_turns_beginning_with_the_first_name():
    board, _ = placement(ready("a"), ready("b"))
    assert [chosen(board) for _ in range(4)] == ["a", "b", "a", "b"]


def test_legs_are_spread_by_slots():
    board, _ = placement(ready("big", slots=6), ready("small", slots=2))
    counts = Counter(chosen(board) for _ in range(80))
    assert counts == {"big": 60, "small": 20}


def test_a_leg_counts_until_it_is_released():
    board, _ = placement(ready("a"), ready("b"))
    assert [chosen(board, frozenset({"b"})) for _ in range(3)] == ["a"] * 3
    for _ in range(3):
        board.release("a", 1)
    board.release("a", 1)  # one too many does no harm
    assert [chosen(board), chosen(board)] == ["a", "b"]


def test_the_cheapest_node_is_filled_first_then_the_least_loaded():
    spot, on_demand = ready("spot", slots=2, rate="0.35"), ready("a-standby", slots=2, rate="0.90")
    board, _ = placement(on_demand, spot)
    assert [chosen(board) for _ in range(6)] == [
        "spot",
        "spot",
        "a-standby",
        "a-standby",
        "a-standby",
        "spot",
    ]


def test_a_silent_node_is_the_last_resort():
    quiet, dear = ready("a", rate="0.1", silent=True), ready("b", slots=1, rate="0.9")
    board, _ = placement(quiet, dear)
    assert [chosen(board) for _ in range(3)] == ["b", "b", "b"]
    assert chosen(board, frozenset({"b"})) == "a"


def test_unknown_model_has_no_node():
    board, _ = placement(ready("a"))
    assert board.choose("other", NOBODY) is None


def test_excluded_nodes_are_not_given():
    board, _ = placement(ready("a"), ready("b"))
    assert [chosen(board, frozenset({"a"})) for _ in range(3)] == ["b"] * 3
    assert chosen(board, frozenset({"a", "b"})) is None


def test_a_draining_incarnation_is_never_given_again_but_the_next_one_is():
    board, _ = placement(ready("a", epoch=7))
    board.drain("a", 7)
    assert chosen(board) is None
    board.update({"m": (ready("a", epoch=7),)})  # the database has not heard of it yet
    assert chosen(board) is None
    board.update({"m": (ready("a", epoch=8),)})
    assert chosen(board) == "a"


def test_a_late_signal_for_an_old_incarnation_changes_nothing():
    board, _ = placement(ready("a", epoch=8))
    board.drain("a", 8)
    board.drain("a", 7)
    assert chosen(board) is None
    board.update({"m": (ready("a", epoch=9),)})
    board.drain("a", 8)
    assert chosen(board) == "a"


def test_a_failed_node_rests_and_comes_back():
    board, clock = placement(ready("a"), ready("b"))
    board.pause("a", 1)
    assert [chosen(board) for _ in range(3)] == ["b"] * 3
    clock.now += FAILURE_PAUSE_S
    assert chosen(board) == "a"


def test_a_failure_does_not_outlive_the_incarnation():
    board, _ = placement(ready("a", epoch=1))
    board.pause("a", 1)
    assert chosen(board) is None
    board.update({"m": (ready("a", epoch=2),)})
    assert chosen(board) == "a"


def test_a_restored_incarnation_is_chosen_again_and_older_ones_are_not():
    board, _ = placement(ready("a", epoch=7))
    board.drain("a", 7)
    board.restore("a", 6)  # another incarnation's cancellation changes nothing
    assert chosen(board) is None
    board.restore("a", 7)
    assert chosen(board) == "a"
    board.update({"m": (ready("a", epoch=6),)})
    assert chosen(board) is None


def test_a_conversation_goes_back_to_the_node_that_knows_it_while_that_has_room():
    board, _ = placement(ready("a", slots=2), ready("b", slots=2))
    first = board.choose("m", NOBODY, b"talk")
    assert first.name == "a"
    assert board.choose("m", NOBODY, b"talk").name == "a"  # b is idle, but knows nothing of it
    assert board.choose("m", NOBODY, b"talk").name == "b"  # a is full
    board.release("a", 1)
    assert board.choose("m", NOBODY, b"talk").name == "b"  # which has read it last
    board.drain("b", 1)
    assert board.choose("m", NOBODY, b"talk").name == "a"
    assert board.choose("other", NOBODY, b"talk") is None


def test_familiarity_is_worth_a_premium_and_no_more():
    spot, on_demand = ready("spot", slots=1, rate="0.35"), ready("standby", slots=9, rate="0.90")
    board, _ = placement(spot, on_demand)
    assert [board.choose("m", NOBODY, b"talk").name for _ in range(2)] == ["spot", "standby"]
    board.release("spot", 1)
    assert board.choose("m", NOBODY, b"talk").name == "spot"


def test_memory_of_conversations_is_bounded(monkeypatch):
    monkeypatch.setattr("brokerage.admission.placement.PREFIXES_MAX", 3)
    board, _ = placement(ready("a", slots=100))
    for number in range(10):
        board.choose("m", NOBODY, bytes([number]))
    assert list(board._readers) == [("m", bytes([number])) for number in (7, 8, 9)]


def test_room_is_what_usable_nodes_have():
    board, _ = placement(ready("a", slots=2), ready("b", slots=3), ready("c", slots=9, silent=True))
    assert board.room("m") == 5
    board.drain("a", 1)
    assert board.room("m") == 3
    board.pause("b", 1)
    assert board.room("m") is None


nodes = st.builds(
    ready,
    name=st.sampled_from("abcdef"),
    epoch=st.integers(1, 3),
    slots=st.integers(1, 4),
    rate=st.sampled_from(["0", "0.35", "0.36", "0.9"]),
    silent=st.booleans(),
)


@given(
    pool=st.lists(nodes, max_size=6, unique_by=lambda each: each.node.name),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["choose", "release", "drain", "restore", "pause", "later"]),
            st.sampled_from("abcdef"),
            st.integers(1, 3),
            st.frozensets(st.sampled_from("abcdef"), max_size=2),
            st.sampled_from([b"", b"p", b"q"]),
        ),
        max_size=40,
    ),
)
def test_whatever_happened_the_choice_is_usable_and_nobody_with_room_was_better(pool, steps):
    board, clock = placement(*pool)
    legs: Counter[str] = Counter()
    drained: dict[str, int] = {}
    paused: dict[tuple[str, int], float] = {}
    for what, name, epoch, exclude, prefix in steps:
        if what == "release":
            board.release(name, epoch)
            if any((r.node.name, r.node.epoch) == (name, epoch) for r in pool):
                legs[name] = max(0, legs[name] - 1)
        elif what == "drain":
            board.drain(name, epoch)
            drained[name] = max(epoch, drained.get(name, 0))
        elif what == "restore":
            board.restore(name, epoch)
            if drained.get(name) == epoch:
                drained[name] = epoch - 1
        elif what == "pause":
            board.pause(name, epoch)
            paused[name, epoch] = clock.now + FAILURE_PAUSE_S
        elif what == "later":
            clock.now += 2.0
        else:
            usable = [
                r
                for r in pool
                if r.node.name not in exclude
                and r.node.epoch > drained.get(r.node.name, 0)
                and paused.get((r.node.name, r.node.epoch), 0) <= clock.now
            ]
            got = board.choose("m", exclude, prefix)
            assert (got is None) == (not usable)
            if got is None:
                continue
            chosen_one = next(r for r in usable if r.node == got)
            awake = [r for r in usable if not r.silent]
            assert not chosen_one.silent or not awake
            roomy = [r for r in awake if legs[r.node.name] < r.slots]
            if roomy:
                assert chosen_one in roomy
                premium = AFFINITY_PREMIUM if prefix else 1
                assert chosen_one.cost <= min(r.cost for r in roomy) * premium
            legs[got.name] += 1


def test_zones_that_are_lost_often_cost_more_and_the_prior_counts_while_little_was_seen(settings):
    settings.EVICTIONS_PER_HOUR_PRIOR, settings.EVICTION_LOST_MINUTES = 0.05, 3
    assert hazard(None) == pytest.approx(0.05)
    assert hazard(Experience(0, 1000)) < hazard(Experience(0, 10)) < hazard(None) < hazard(Experience(3, 10))
    assert hazard(Experience(500, 1000)) == pytest.approx(0.5, rel=0.05)
    assert expected_cost(1.0, 0.0) == 1.0
    assert expected_cost(1.0, 1.0) == pytest.approx(1 / 0.95)  # three minutes of every hour are lost
    assert expected_cost(1.0, 1000.0) == pytest.approx(10.0)


async def test_experience_is_read_from_notices_and_changes_the_choice(admission, world, monkeypatch):
    monkeypatch.setattr("brokerage.admission.broker.HAZARD_REFRESH_S", 0.0)

    def history() -> None:
        NodeRow.objects.update(
            hourly_rate="0.500", provider="aws", zone="calm", last_seen_at=datetime.now(UTC)
        )
        wild = factories.make_node(
            "wild", provider="aws", zone="wild", state="ready", epoch=9, host="h", port=1, slots=4,
            hourly_rate="0.499", last_seen_at=datetime.now(UTC),
        )  # fmt: skip
        for epoch in range(9):
            EvictionNotice.objects.create(
                node=wild, epoch=epoch, source="aws", action="terminate", fingerprint=str(epoch),
                signal_at=datetime.now(UTC),
            )  # fmt: skip
        EvictionNotice.objects.create(
            node=wild, epoch=8, source="aws", action="cancel", fingerprint="c", signal_at=datetime.now(UTC)
        )

    await orm(history)

    async def known() -> bool:
        return ("aws", "wild") in admission._experience and len(admission._snapshot.nodes["gemma"]) == 2

    await eventually(known)
    await admission._refresh()
    assert admission._experience["aws", "wild"].evictions == 8
    assert admission.choose_node("gemma").name == "node-a"
