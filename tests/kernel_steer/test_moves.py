"""When answers are asked to leave a node, and which."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from kernel_steer.engine.base import NodeKey
from kernel_steer.gateway.moves import Moves

NODE = NodeKey("a", 7)


class Run:
    """As much of an answer as `Moves` sees."""

    def __init__(self, name: str, epoch: int) -> None:
        self.place, self.moved = (name, epoch), asyncio.Event()

    def is_on(self, name: str, epoch: int) -> bool:
        return self.place == (name, epoch)

    def move(self) -> None:
        self.moved.set()


def after(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.fixture
async def run():
    return Run("a", 7)


@pytest.mark.parametrize("deadline", [None, -300.0, 5.0], ids=["unsaid", "past", "near"])
async def test_a_near_deadline_moves_at_once_and_only_that_incarnation(run, deadline):
    moves, other, elsewhere = Moves(margin_s=20), Run("a", 6), Run("b", 7)
    with moves.tracking([run, other]), moves.tracking([elsewhere]):
        moves.leaving(NODE, None if deadline is None else after(deadline))
        await asyncio.wait_for(run.moved.wait(), 30)
    assert not other.moved.is_set()
    assert not elsewhere.moved.is_set()


async def test_a_far_deadline_lets_answers_end_by_themselves(run):
    moves = Moves(margin_s=20)
    with moves.tracking([run]):
        moves.leaving(NODE, after(620))
        loop = asyncio.get_running_loop()
        assert 0 < moves._timers[NODE].when() - loop.time() <= 600
        await asyncio.sleep(0)
        assert not run.moved.is_set()
        moves.leaving(NODE, after(20.2))  # as it is said ten minutes later
        await asyncio.wait_for(run.moved.wait(), 30)


async def test_a_notice_that_is_taken_back_moves_nobody(run):
    moves = Moves(margin_s=20)
    with moves.tracking([run]):
        moves.leaving(NODE, after(20.1))
        moves.staying(NODE)
        moves.leaving(NodeKey("z", 1), after(20.2))  # its timer is due after the one that was cancelled
        await asyncio.wait_for(_until_idle(moves), 30)
    assert not run.moved.is_set()


async def test_an_answer_that_has_ended_is_not_asked(run):
    moves = Moves()
    with moves.tracking([run]):
        pass
    moves.leaving(NODE, None)
    await asyncio.wait_for(_until_idle(moves), 30)
    assert not run.moved.is_set()


async def _until_idle(moves: Moves) -> None:
    while moves._timers:
        await asyncio.sleep(0.01)
