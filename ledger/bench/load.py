"""Loads, each by several clients at once, and what they measured."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psycopg

from ledger.bench.client import BATCH, LINES, Order, enter, run_client

WALLETS = 1000
_CREDIT = 1_000_000_000

# Phase -> what one call of a client counts for.
PHASES = {"single": 1, "hot": 1, "hot_wallet": 1, "batch100": BATCH, "usage": LINES}


@dataclass(frozen=True, slots=True)
class Figures:
    """`per_s`: postings, or usage lines, of all clients together. `p99_ms`: of one call."""

    per_s: float
    p99_ms: float


class Bench:
    """Clients that stay connected to one database of the ledger, for as many phases as wanted."""

    def __init__(self, url: str, clients: int) -> None:
        self._url, self._clients = url, clients
        self._runs = 0
        self._booked: dict[str, int] = {}

    def __enter__(self) -> Self:
        with psycopg.connect(self._url) as connection:
            self._wallets, self._platform = _open_accounts(connection)
        # Processes of their own from the start: nothing of this one is shared with them.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            self._clients, mp_context=context, initializer=enter, initargs=(context.Barrier(self._clients),)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def run(self, phase: str, seconds: float) -> Figures:
        """Runs a phase of PHASES; all clients begin when the last is ready."""
        self._runs += 1
        orders = [
            Order(
                url=self._url, phase=phase, seconds=seconds, client=client, clients=self._clients,
                key=f"{self._runs}.{client}", wallets=self._wallets, platform=self._platform,
            )
            for client in range(self._clients)
        ]  # fmt: skip
        by_client = list(self._pool.map(run_client, orders))
        self._booked[phase] = self._booked.get(phase, 0) + sum(map(len, by_client))
        # Each client by its own clock: the last call of each ends after the seconds asked for.
        per_s = sum(len(calls) * PHASES[phase] / (sum(calls) / 1e9) for calls in by_client)
        calls_ns = [took for calls in by_client for took in calls]
        return Figures(round(per_s, 1), round(_p99(calls_ns) / 1e6, 2))

    def check(self) -> None:
        """Every confirmed call is in the books, and they balance. Raises AssertionError."""
        with psycopg.connect(self._url) as connection:
            for phase, calls in self._booked.items():
                if phase == "usage":
                    _check_usage(connection, calls)
                    continue
                journals = calls * (BATCH if phase == "batch100" else 1)
                counted = connection.execute(
                    "SELECT count(*) FROM ledger_journal WHERE idem_scope = %s", [f"bench.{phase}"]
                ).fetchone()
                assert counted == (journals,), f"{phase}: {counted} journals, {journals} were confirmed"
            wrong = connection.execute(
                """SELECT b.account_id FROM ledger_balance b
                     JOIN (SELECT account_id, sum(amount) AS total FROM ledger_entries GROUP BY account_id) e
                       USING (account_id) WHERE e.total <> b.posted"""
            ).fetchall()
            assert wrong == [], f"balances differ from their entries: {wrong}"


def _check_usage(connection: psycopg.Connection[tuple[object, ...]], calls: int) -> None:
    """Clients post each other's lines too, and leave some to each other: those are posted now."""
    while connection.execute("SELECT usage_post(10000, 'bench')").fetchone() != (0,):
        pass
    counted = connection.execute("SELECT count(*), count(journal_id) FROM usage_line").fetchone()
    assert counted == (calls * LINES, calls * LINES), (
        f"usage: {counted} lines loaded and posted, {calls * LINES} sent"
    )


def _open_accounts(connection: psycopg.Connection[tuple[object, ...]]) -> tuple[list[int], int]:
    """WALLETS wallets with credit, and the platform account that all of them pay to."""
    (platform,) = connection.execute(
        "SELECT account_open('usage_revenue:USD', 'platform', 'USD', 'revenue', true)"
    ).fetchone() or (0,)
    rows = connection.execute(
        """SELECT account_open('customer_credit:' || n, 'bench', 'USD', 'liability', false)
             FROM generate_series(1, %s) n""",
        [WALLETS],
    ).fetchall()
    wallets = [int(str(row[0])) for row in rows]
    lines = [{"account": wallet, "amount": str(_CREDIT)} for wallet in wallets]
    lines.append({"account": platform, "amount": str(-_CREDIT * WALLETS)})
    connection.execute(
        "SELECT ledger_post('bench', 'credit', 'credit', 'USD', %s, 'bench')", [json.dumps(lines)]
    )
    return wallets, int(str(platform))


def _p99(values: list[int]) -> float:
    """The value that 99 of 100 calls do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-99 * len(ordered) // 100) - 1)] if ordered else 0.0
