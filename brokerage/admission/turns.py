"""Whose request goes next when there are more than the nodes can take.

While there is room nobody waits. Without room, requests wait for a moment, and each answer that ends makes
way for the waiting customer who has the fewest answers under way (max-min fairness), of several the one who
waits longest. So a customer with a thousand requests delays nobody else's first one by more than one
answer. The wait is short and the line is bounded: whoever is not served in time is told to come back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kernel_steer.admission import Refusal

WAIT_S = 5.0
# Of one customer for one model.
WAITING_MAX = 64
_RETRY_AFTER_S = 2


@dataclass(slots=True)
class _Waiting:
    since: float
    request_id: str
    turn: asyncio.Future[None]


@dataclass(slots=True)
class _Line:
    """Of one model."""

    at_work: Counter[str] = field(default_factory=Counter)  # by customer
    waiting: OrderedDict[str, deque[_Waiting]] = field(default_factory=OrderedDict)  # by customer


class Turns:
    """`room(model)` is how many answers may be under way; None is no bound. For one event loop."""

    def __init__(
        self,
        room: Callable[[str], int | None],
        *,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._wait_s = wait_s
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._taken: dict[str, tuple[str, str]] = {}  # request id -> model and customer

    async def take(self, model: str, customer: str, request_id: str) -> None:
        """Returns when it is the request's turn, which lasts until `give`. Raises Refusal 503.

        Idempotent by request id.
        """
        if request_id in self._taken:
            return
        line = self._lines.setdefault(model, _Line())
        if not line.waiting and self._has_room(model, line):
            self._let_in(model, line, customer, request_id)
            return
        queue = line.waiting.setdefault(customer, deque())
        if len(queue) >= WAITING_MAX:
            raise _overloaded("too many of your requests for it wait already")
        mine = _Waiting(self._clock(), request_id, asyncio.get_running_loop().create_future())
        queue.append(mine)
        try:
            async with asyncio.timeout(self._wait_s):
                await mine.turn
        except TimeoutError:
            raise _overloaded(f"no turn came within {self._wait_s:g} s") from None
        except asyncio.CancelledError:
            self.give(request_id)  # the turn may just have come
            raise
        finally:
            self._leave(line, customer, mine)

    def give(self, request_id: str) -> None:
        """The answer has ended, or never began. Unknown requests have no turn to give."""
        taken = self._taken.pop(request_id, None)
        if taken is None:
            return
        model, customer = taken
        line = self._lines[model]
        line.at_work[customer] -= 1
        if line.at_work[customer] <= 0:
            del line.at_work[customer]
        self._advance(model, line)

    def advance(self) -> None:
        """There may be more room than before."""
        for model, line in list(self._lines.items()):
            self._advance(model, line)
            if not line.waiting and not line.at_work:
                del self._lines[model]

    def _advance(self, model: str, line: _Line) -> None:
        while line.waiting and self._has_room(model, line):
            customer = min(line.waiting, key=lambda name: (line.at_work[name], line.waiting[name][0].since))
            first = line.waiting[customer][0]
            self._leave(line, customer, first)
            self._let_in(model, line, customer, first.request_id)
            first.turn.set_result(None)

    def _has_room(self, model: str, line: _Line) -> bool:
        room = self._room(model)
        return room is None or line.at_work.total() < room

    def _let_in(self, model: str, line: _Line, customer: str, request_id: str) -> None:
        line.at_work[customer] += 1
        self._taken[request_id] = (model, customer)

    @staticmethod
    def _leave(line: _Line, customer: str, mine: _Waiting) -> None:
        queue = line.waiting.get(customer)
        if queue is not None and mine in queue:
            queue.remove(mine)
            if not queue:
                del line.waiting[customer]


def _overloaded(why: str) -> Refusal:
    return Refusal(
        503,
        "overloaded",
        f"This model has more requests than its nodes can take now: {why}. Nothing was charged; try again.",
        retry_after_s=_RETRY_AFTER_S,
    )
