"""pgledger under the same loads as our ledger. Its SQL comes by path; it is not part of this program.

    python pgledger_load.py URL prepare FILE.sql [FILE.sql ...]
    python pgledger_load.py URL single|hot|batch100 SECONDS CLIENTS

Prints {"per_s", "p99_ms"}. Singles are `pgledger_create_transfer`, batches `pgledger_create_transfers` with an
array of requests: its own fastest way.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

ACCOUNTS, BATCH = 1000, 100
_TRANSFER = "SELECT id FROM pgledger_create_transfer(%s, %s, 0.01)"
_TRANSFERS = """
SELECT count(*) FROM pgledger_create_transfers(
    transfer_requests => ARRAY(SELECT ROW(f, t, 0.01)::transfer_request FROM unnest(%s::text[], %s::text[]) AS r (f, t)),
    event_at => now())
"""
gate: Any = None


def prepare(url: str, files: list[str]) -> None:
    with psycopg.connect(url) as connection:
        for file in files:
            connection.execute(Path(file).read_text())
        for number in range(ACCOUNTS + 1):
            connection.execute(
                "SELECT id FROM pgledger_create_account(%s, 'USD', allow_negative_balance => true)",
                [f"account {number}"],
            )


def run(url: str, phase: str, seconds: float, clients: int) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    with context.Pool(clients, enter, [context.Barrier(clients)]) as pool:
        by_client = pool.starmap(client, [(url, phase, seconds, n) for n in range(clients)], chunksize=1)
    weight = BATCH if phase == "batch100" else 1
    calls = sorted(took for client_calls in by_client for took in client_calls)
    return {
        "per_s": round(sum(len(own) * weight / (sum(own) / 1e9) for own in by_client), 1),
        "p99_ms": round(calls[-(-99 * len(calls) // 100) - 1] / 1e6, 2),
    }


def enter(barrier: Any) -> None:
    global gate
    gate = barrier


def client(url: str, phase: str, seconds: float, own: int) -> list[int]:
    with psycopg.connect(url, autocommit=True) as connection:
        accounts = [row[0] for row in connection.execute("SELECT id FROM pgledger_accounts ORDER BY name")]
        call = {"single": single, "hot": hot, "batch100": batch100}[phase](connection, accounts, own)
        gate.wait(60)
        took: list[int] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.perf_counter_ns()
            call(len(took))
            took.append(time.perf_counter_ns() - began)
        return took


def pick(accounts: list[str], own: int, number: int) -> str:
    return accounts[(number * 7919 + own * 131) % ACCOUNTS]


def single(connection: Any, accounts: list[str], own: int) -> Callable[[int], None]:
    def call(number: int) -> None:
        connection.execute(_TRANSFER, [pick(accounts, own, number), pick(accounts, own, number + 500)])

    return call


def hot(connection: Any, accounts: list[str], own: int) -> Callable[[int], None]:
    def call(number: int) -> None:
        connection.execute(_TRANSFER, [pick(accounts, own, number), accounts[-1]])

    return call


def batch100(connection: Any, accounts: list[str], own: int) -> Callable[[int], None]:
    """From the client's own share of the accounts, as in our load."""

    def call(number: int) -> None:
        first = number * BATCH
        sources = [pick(accounts, own, index) for index in range(first, first + BATCH)]
        connection.execute(_TRANSFERS, [sources, [accounts[-1]] * BATCH])

    return call


if __name__ == "__main__":
    address, what, *rest = sys.argv[1:]
    if what == "prepare":
        prepare(address, rest)
    else:
        print(json.dumps(run(address, what, float(rest[0]), int(rest[1]))))
