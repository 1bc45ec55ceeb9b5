"""Which node gets the next leg."""

from collections import Counter
from decimal import Decimal

from brokerage.admission.placement import FAILURE_PAUSE_S, Placement
from brokerage.admission.snapshot import ReadyNode
from kernel_steer.admission import Node

NOBODY: frozenset[str] = frozenset()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ready(name: str, *, epoch: int = 1, slots: int = 4, rate: str = "0", silent: bool = False) -> ReadyNode:
    return ReadyNode(Node(name=name, epoch=epoch, host="127.0.0.1", port=9000), slots, Decimal(rate), silent)


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
