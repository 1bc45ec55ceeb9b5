"""kill -9 of PostgreSQL, worker and web at random moments of thousands of operations: each happens, and once.

Clients do what a careful client does: an operation that was not confirmed is asked for again under the same key.
So in the end every operation must have happened exactly once, whatever died in its middle.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from itertools import cycle
from typing import Any

import psycopg
import pytest
import requests

from apex.demo.purchase import PurchaseFailed, approve
from apex.local.paths import BASE_DIR
from apex.local.postgres import APP_ROLE, EmbeddedPostgres
from apex.local.stack import Stack
from tests.e2e.test_story import environ, home, manage

__all__ = ["home"]  # fixture
pytestmark = pytest.mark.e2e

OPERATIONS = int(os.environ.get("APEX_TEST_OPERATIONS", "10000"))
CLIENTS = 4
KILLS_OF_EACH = 2
CREDIT, TOP_UP = Decimal(100_000), Decimal("7.50")
TOP_UP_EVERY = 50  # others: a purchase takes three processes and some seconds
PATIENCE_S = 240  # for one operation, on a busy machine, while things are started again

_CUSTOMERS = """
import json
from decimal import Decimal
from brokerage.models import Customer
from brokerage.services.keys import issue_key
from ledger.services import Line, open_wallet, platform_account, post_journal
made = []
for n in range({clients}):
    customer = Customer.objects.create(name=f"Team {{n}}")
    wallet = open_wallet(code=customer.wallet_code, owner=str(customer.pk), currency="USD")
    bank = platform_account(code="bank", currency="USD")
    credit = Decimal("{credit}")
    post_journal(scope="test", key=str(customer.pk), kind="credit", currency="USD", actor="test",
                 lines=[Line(bank.pk, -credit), Line(wallet.pk, credit)])
    key = issue_key(customer=customer, name="test", actor=None).plaintext
    revenue = platform_account(code="usage_revenue", currency="USD").pk
    made.append({{"wallet": wallet.pk, "revenue": revenue, "key": key}})
print(json.dumps(made))
"""

LINES = """jsonb_build_array(jsonb_build_object('account', %(wallet)s::bigint, 'amount', '-1'),
                             jsonb_build_object('account', %(revenue)s::bigint, 'amount', '1'))"""
POST = f"SELECT journal_id FROM ledger_post('crash', %(key)s, 'usage', 'USD', {LINES}, 'test')"
HOLD = "SELECT hold_id FROM hold_create(%(wallet)s, 3, 'USD', %(key)s, '1 hour', 'test')"
CAPTURE = f"SELECT hold_capture(%(hold)s, 'crash', %(key)s, 'usage', 'USD', {LINES}, 'test')"
REVERSE = "SELECT reverse_journal(%(journal)s, 'test', 'test')"
BATCH = f"""SELECT count(*) FROM ledger_post_batch((
    SELECT jsonb_agg(jsonb_build_object('scope', 'crash', 'key', %(key)s || '.' || n, 'kind', 'usage',
                                        'currency', 'USD', 'actor', 'test', 'lines', {LINES}))
      FROM generate_series(1, 10) n))"""
COPY = """COPY pg_temp.usage_line_staging (event_id, account_id, sku, quantity, rate, amount, currency, occurred_at, hold_id)
          FROM STDIN"""


class Client(threading.Thread):
    """Does its share of the operations, each until it is confirmed. `spent` is what they cost together."""

    def __init__(self, number: int, account: dict[str, Any], stack: Stack, database: str) -> None:
        super().__init__(daemon=True)
        self.number, self.done, self.spent, self.bought = number, 0, Decimal(0), Decimal(0)
        self.lines = 0  # of metered usage
        self.keys: list[str] = []  # of the journals that are there in the end, each once
        self.error: BaseException | None = None
        self._account, self._stack, self._database = account, stack, database
        self._connection: psycopg.Connection[Any] | None = None

    def run(self) -> None:
        try:
            kinds = cycle(
                [
                    self._post,
                    self._batch,
                    self._captured,
                    self._voided,
                    self._reversed,
                    self._metered,
                    self._charged,
                ]
            )
            rounds = -(-OPERATIONS // (CLIENTS * 28))  # one of each kind is 28 operations
            for number in range(rounds * 7):
                if number % TOP_UP_EVERY == 0:
                    self._until_confirmed(self._top_up, f"{self.number}-{number}")
                self._until_confirmed(next(kinds), f"{self.number}-{number}")
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def _until_confirmed(self, operation: Callable[[str], int], key: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.done += operation(key)
                return
            except (
                psycopg.OperationalError,
                psycopg.errors.InternalError_,
                requests.RequestException,
                PurchaseFailed,
            ):
                if time.monotonic() > deadline:
                    raise
                self._connection = None
                time.sleep(0.05)

    # --- straight at the ledger's functions, as the application's role -----------------------------------

    def _ask(self, query: str, **values: Any) -> Any:
        if self._connection is None:
            self._connection = psycopg.connect(self._database, autocommit=True, connect_timeout=10)
        row = self._connection.execute(query, {**self._account, **values}).fetchone()
        return row[0] if row else None

    def _post(self, key: str) -> int:
        self._ask(POST, key=key)
        self.spent += 1
        self.keys.append(key)
        return 1

    def _batch(self, key: str) -> int:
        assert self._ask(BATCH, key=key) == 10
        self.spent += 10
        self.keys += [f"{key}.{n}" for n in range(1, 11)]
        return 10

    def _captured(self, key: str) -> int:
        self._ask(CAPTURE, key=key, hold=self._ask(HOLD, key=key))
        self.spent += 1
        self.keys.append(key)
        return 2

    def _voided(self, key: str) -> int:
        self._ask("SELECT hold_void(%(hold)s)", hold=self._ask(HOLD, key=key))
        return 2

    def _reversed(self, key: str) -> int:
        self._ask(REVERSE, journal=self._ask(POST, key=key))
        self.keys.append(key)
        return 2

    def _metered(self, key: str) -> int:
        """Booked by the worker, some seconds later."""
        self._copy("usage_load()", [(f"{key}.{n}", "0.25", None) for n in range(5)])
        self.spent += 5 * Decimal("0.25")
        self.lines += 5
        return 5

    def _charged(self, key: str) -> int:
        holds = [self._ask(HOLD, key=f"{key}.{n}") for n in range(3)]
        self._copy("usage_charge('test')", [(f"{key}.{n}", "0.5", hold) for n, hold in enumerate(holds)])
        self.spent += 3 * Decimal("0.5")
        self.lines += 3
        return 6

    def _copy(self, function: str, lines: list[tuple[str, str, int | None]]) -> None:
        self._ask("SELECT 1")
        assert self._connection is not None
        with self._connection.transaction():
            self._connection.execute("SELECT usage_stage()")
            with self._connection.cursor().copy(COPY) as copy:
                for event, amount, hold in lines:
                    copy.write_row(
                        (
                            event,
                            self._account["wallet"],
                            "tokens",
                            1,
                            None,
                            amount,
                            "USD",
                            "2026-12-01 00:00:00+00",
                            hold,
                        )
                    )
            self._connection.execute(f"SELECT * FROM {function}")

    # --- through the web, PayPal and the worker ----------------------------------------------------------

    def _top_up(self, key: str) -> int:
        with requests.Session() as session:
            asked = session.post(
                f"{self._stack.web_url}/v1/topups",
                json={"amount": {"amount": f"{TOP_UP}", "currency": "USD"}},
                headers={"Authorization": f"Bearer {self._account['key']}", "Idempotency-Key": key},
                timeout=20,
            )
            if asked.status_code != 201:
                raise PurchaseFailed(f"{asked.status_code} {asked.text[:200]}")
            page = asked.json()["approve_url"]
            if "decided already" not in session.get(page, timeout=20).text:
                approve(session, page)
        self.bought += TOP_UP
        return 1


def test_every_operation_happens_once_whatever_dies(home, tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - shown when it fails
    chance = random.Random(seed)
    parts = ("migrate", "collectstatic", "paypal-stub", "web", "worker", "beat")
    with Stack(only=parts, nodes=(), environ=environ(home), console=None) as stack:
        made = subprocess.run(
            [sys.executable, "manage.py", "shell", "--verbosity=0", "-c", _CUSTOMERS.format(clients=CLIENTS, credit=CREDIT)],
            cwd=BASE_DIR, env=stack.environ, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        database = EmbeddedPostgres.at(home).url(APP_ROLE)
        accounts = json.loads(made.stdout.splitlines()[-1])
        clients = [Client(n, account, stack, database) for n, account in enumerate(accounts)]
        for client in clients:
            client.start()
        _kill_now_and_then(stack, clients, chance)
        for client in clients:
            client.join(PATIENCE_S * 2)
            assert not client.is_alive()
            if client.error is not None:
                raise client.error
        assert sum(client.done for client in clients) >= OPERATIONS

        with psycopg.connect(database, autocommit=True) as connection:
            for client, account in zip(clients, accounts, strict=True):
                expected = CREDIT - client.spent + client.bought, Decimal(0), client.lines
                _wait_for(partial(_standing, connection, account["wallet"]), expected)
            booked = connection.execute("SELECT idem_key FROM ledger_journal WHERE idem_scope = 'crash'")
            assert sorted(key for (key,) in booked) == sorted(
                key for client in clients for key in client.keys
            )
        verified = manage(stack.environ, "ledger_verify", "--json")
        assert json.loads(verified.stdout)["ok"] is True, verified.stdout
        books = tmp_path / "books.journal"
        exported = manage(stack.environ, "ledger_export", "--hledger", "--output", str(books))
        assert exported.returncode == 0, exported.stderr
        if shutil.which("hledger"):
            subprocess.run(["hledger", "check", "-s", "-f", str(books)], check=True, timeout=120)


def _kill_now_and_then(stack: Stack, clients: list[Client], chance: random.Random) -> None:
    victims = ["postgres", "worker", "web"] * KILLS_OF_EACH
    chance.shuffle(victims)
    shares = sorted(chance.uniform(0.05, 0.85) for _ in victims)
    for victim, share in zip(victims, shares, strict=True):
        while sum(client.done for client in clients) < OPERATIONS * share:
            if not any(client.is_alive() for client in clients):
                break
            time.sleep(0.01)
        process = stack.process(victim)
        process.kill()
        process.wait_ready()
        assert stack.failure is None


def _standing(connection: psycopg.Connection[Any], wallet: int) -> tuple[Decimal, Decimal, int]:
    """Posted, held, and the usage lines that are booked."""
    row = connection.execute(
        "SELECT posted, held, (SELECT count(*) FROM usage_line l WHERE l.account_id = b.account_id"
        " AND l.journal_id IS NOT NULL) FROM ledger_balance b WHERE account_id = %s",
        [wallet],
    ).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


def _wait_for(look: Callable[[], Any], expected: Any, timeout_s: float = 120) -> None:
    """Purchases and metered lines are on their way until the worker has come to them."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) != expected:
        assert time.monotonic() < deadline, f"{found} is not {expected}"
        time.sleep(0.1)
