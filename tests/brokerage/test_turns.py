"""Fairness when there are more requests than the nodes can take."""

import asyncio

import pytest

from brokerage.admission import turns as module
from brokerage.admission.turns import Turns
from brokerage.models import Node
from kernel_steer.admission import Caller, Refusal
from tests.brokerage import factories
from tests.brokerage.broker import admit, orm, refusal_of
from tests.brokerage.test_admission import answer_for


class Hall:
    """Turns with a given room, and who got in, in order."""

    def __init__(self, room: int | None, wait_s: float = 5.0) -> None:
        self.room = room
        self.turns = Turns(lambda model: self.room, wait_s=wait_s)
        self.inside: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, *names: str) -> None:
        """`alice-1` is the first request of alice."""
        for name in names:
            self.tasks.append(asyncio.create_task(self._come(name)))
        for _ in range(3):
            await asyncio.sleep(0)

    async def _come(self, name: str) -> None:
        await self.turns.take("m", name.split("-")[0], name)
        self.inside.append(name)

    async def end(self, *names: str) -> None:
        for name in names:
            self.turns.give(name)
            for _ in range(3):
                await asyncio.sleep(0)


async def test_with_room_nobody_waits_and_without_nodes_nobody_is_held_up():
    hall = Hall(3)
    await hall.come("a-1", "a-2", "b-1")
    assert hall.inside == ["a-1", "a-2", "b-1"]
    nowhere = Hall(None)
    await nowhere.come(*[f"a-{number}" for number in range(100)])
    assert len(nowhere.inside) == 100


async def test_a_flood_of_one_customer_does_not_keep_another_out():
    hall = Hall(4)
    await hall.come(*[f"flood-{number}" for number in range(40)])
    await hall.come("calm-1")
    assert len(hall.inside) == 4
    await hall.end("flood-0")
    assert hall.inside[-1] == "calm-1"
    await hall.come("calm-2", "calm-3")
    await hall.end("flood-1", "flood-2", "flood-3")
    assert hall.inside[-3:] == ["calm-2", "flood-4", "flood-5"]  # two each


async def test_shares_even_out_among_all_who_wait():
    hall = Hall(6)
    await hall.come(*[f"{name}-{number}" for name in "abc" for number in range(20)])
    for _ in range(30):
        await hall.end(hall.inside[-6])
    last = [name.split("-")[0] for name in hall.inside[-6:]]
    assert sorted(last) == ["a", "a", "b", "b", "c", "c"]


async def test_who_waits_too_long_or_too_much_is_told_to_come_back(monkeypatch):
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    hall = Hall(1, wait_s=0.01)
    await hall.come("a-1")
    waiting = [asyncio.create_task(hall.turns.take("m", "a", f"a-{number}")) for number in (2, 3)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="too many of your requests") as caught:
        await hall.turns.take("m", "a", "a-4")
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "overloaded", 2)
    for task in waiting:
        with pytest.raises(Refusal, match="no turn came"):
            await task
    await hall.end("a-1")
    await hall.come("a-5")
    assert hall.inside == ["a-1", "a-5"]


async def test_nothing_stays_taken_by_who_left_or_asked_twice():
    hall = Hall(1)
    await hall.come("a-1", "a-1", "b-1", "c-1")
    hall.tasks[2].cancel()
    await asyncio.wait([hall.tasks[2]])
    await hall.end("a-1", "a-1", "unknown")
    assert hall.inside == ["a-1", "a-1", "c-1"]
    await hall.end("c-1")
    hall.turns.advance()
    assert not hall.turns._lines
    assert not hall.turns._taken


async def test_new_room_is_filled_at_once():
    hall = Hall(1)
    await hall.come("a-1", "a-2", "a-3")
    hall.room = 3
    hall.turns.advance()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert hall.inside == ["a-1", "a-2", "a-3"]


async def test_the_gateway_keeps_turns_and_an_overload_costs_nothing(admission, world, settings):
    """Four slots, one answer each."""
    settings.GATEWAY_ANSWERS_PER_SLOT = 1
    await orm(lambda: Node.objects.update(slots=4))
    await admission._refresh()
    admission._turns._wait_s = 0.05
    tickets = [await admit(admission, world) for _ in range(4)]
    refusal = await refusal_of(admit(admission, world, request_id="8e4ee301-9ab0-4f09-84c7-6d4b07d3ba73"))
    assert (refusal.status, refusal.code) == (503, "overloaded")
    await admission.abandon("8e4ee301-9ab0-4f09-84c7-6d4b07d3ba73", {})
    other = await orm(lambda: factories.make_customer(credit="1", name="Calm"))
    _, plaintext = await orm(lambda: factories.make_key(other))
    caller = await admission.authenticate(f"Bearer {plaintext}")
    admission._turns._wait_s = 5.0
    waiting = [asyncio.create_task(admit(admission, world)) for _ in range(3)]
    await asyncio.sleep(0)
    calm = asyncio.create_task(
        admission.admit(
            Caller(caller.key_id, caller.customer_id),
            request_id="5b3ad4a8-31c9-4c06-a20f-dd16bd0ef4f5",
            model="gemma",
            prompt_tokens_max=10,
            completion_tokens_max=10,
        )
    )
    await asyncio.sleep(0)
    await admission.settle(answer_for(tickets[0]))
    await calm
    assert not any(task.done() for task in waiting)
    for ticket in tickets[1:]:
        await admission.abandon(ticket.request_id, ticket.record)
    await asyncio.gather(*waiting)
