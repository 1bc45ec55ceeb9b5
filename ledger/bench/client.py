"""One client: a process with a connection of its own. Imports nothing of Django, so it starts quickly."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from multiprocessing.synchronize import Barrier

import psycopg

# A machine under load takes its time to start Python eight times.
_START_S = 60.0
BATCH = 100
LINES = 1000
# Usage of this many wallets is netted into one journal: a shard of customers, in one tick.
_WALLETS_PER_TICK = 100

_POST = "SELECT journal_id FROM ledger_post(%s, %s, 'usage', 'USD', %s, 'bench')"
_POST_BATCH = "SELECT count(*) FROM ledger_post_batch(%s)"
_COPY = """
COPY pg_temp.usage_line_staging (event_id, account_id, sku, quantity, rate, currency, occurred_at) FROM STDIN
"""


@dataclass(frozen=True, slots=True)
class Order:
    """What a client is to do, and where."""

    url: str
    phase: str
    seconds: float
    client: int
    clients: int
    key: str
    wallets: list[int]
    platform: int


Call = Callable[[int], None]
Connection = psycopg.Connection[tuple[object, ...]]


class _Gate:
    """Where the clients of a phase wait until the last of them is connected."""

    barrier: Barrier


def enter(barrier: Barrier) -> None:
    """Run once in each client's process."""
    _Gate.barrier = barrier


def run_client(order: Order) -> list[int]:
    """Calls until the time is over; gives the duration of each call in nanoseconds."""
    with psycopg.connect(order.url, autocommit=True) as connection:
        call = _CALLS[order.phase](connection, order)
        _Gate.barrier.wait(_START_S)
        took: list[int] = []
        end = time.monotonic() + order.seconds
        while time.monotonic() < end:
            began = time.perf_counter_ns()
            call(len(took))
            took.append(time.perf_counter_ns() - began)
        return took


def _single(connection: Connection, order: Order) -> Call:
    """From one of the wallets to another: two rows are locked."""

    def call(number: int) -> None:
        source, target = _pick(order, number), _pick(order, number + 500)
        connection.execute(_POST, ["bench.single", f"{order.key}.{number}", _lines(source, target)])

    return call


def _hot(connection: Connection, order: Order) -> Call:
    """From all the wallets to one account of the platform, which is appended to."""

    def call(number: int) -> None:
        lines = _lines(_pick(order, number), order.platform)
        connection.execute(_POST, ["bench.hot", f"{order.key}.{number}", lines])

    return call


def _hot_wallet(connection: Connection, order: Order) -> Call:
    """All clients on one wallet, which is locked: the worst case."""
    lines = _lines(order.wallets[0], order.platform)

    def call(number: int) -> None:
        connection.execute(_POST, ["bench.hot_wallet", f"{order.key}.{number}", lines])

    return call


def _batch100(connection: Connection, order: Order) -> Call:
    """From the client's own share of the wallets: a poster claims its customers, else batches would queue."""
    own = replace(order, wallets=order.wallets[order.client :: order.clients])

    def call(number: int) -> None:
        first = number * BATCH
        journals = ", ".join(
            f'{{"scope": "bench.batch100", "key": "{order.key}.{index}", "kind": "usage", "currency": "USD",'
            f' "actor": "bench", "lines": {_lines(_pick(own, index), order.platform)}}}'
            for index in range(first, first + BATCH)
        )
        connection.execute(_POST_BATCH, [f"[{journals}]"])

    return call


def _usage(connection: Connection, order: Order) -> Call:
    """Usage lines by COPY, told from known ones by their id; one client posts those of all, netted per wallet."""
    connection.execute("SELECT usage_stage()")
    first = order.client * _WALLETS_PER_TICK % len(order.wallets)
    wallets = order.wallets[first : first + _WALLETS_PER_TICK]
    quantity, rate, moment = Decimal(1234), Decimal("0.00000001"), datetime.now(UTC)

    def call(number: int) -> None:
        with connection.transaction():
            with connection.cursor().copy(_COPY) as copy:
                for line in range(LINES):
                    wallet = wallets[line % len(wallets)]
                    copy.write_row((uuid.uuid4().hex, wallet, "bench", quantity, rate, "USD", moment))
            connection.execute("SELECT usage_load()")
        if order.client == 0:
            connection.execute("SELECT usage_post(%s, 'bench')", [100 * LINES])

    return call


_CALLS: dict[str, Callable[[Connection, Order], Call]] = {
    "single": _single,
    "hot": _hot,
    "hot_wallet": _hot_wallet,
    "batch100": _batch100,
    "usage": _usage,
}


def _pick(order: Order, number: int) -> int:
    """One of the wallets, each client in an order of its own; the factor has no divisor in common."""
    return order.wallets[(number * 7919 + order.client * 131) % len(order.wallets)]


def _lines(source: int, target: int) -> str:
    return f'[{{"account": {source}, "amount": "-0.000012345"}}, {{"account": {target}, "amount": "0.000012345"}}]'
