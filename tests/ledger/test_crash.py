"""kill -9 of PostgreSQL in the middle of postings: what was confirmed is there, and the books balance."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections

from apex.local.postgres import APP_ROLE, DATABASE, OWNER_ROLE, EmbeddedPostgres
from ledger.models import Journal
from ledger.rebuild import rebuild_and_compare
from ledger.selectors import account_balance
from ledger.services import platform_account
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet

POST = """
SELECT journal_id FROM ledger_post('crash', %s, 'usage', 'USD', jsonb_build_array(
    jsonb_build_object('account', %s::bigint, 'amount', '-1'), jsonb_build_object('account', %s::bigint, 'amount', '1')
), 'test')
"""
# What else happens meanwhile: each leaves half of something behind when it dies in the middle, or it should.
OTHERS = [
    """SELECT ledger_post_batch(jsonb_build_array(jsonb_build_object(
           'scope', 'crash.held', 'key', %(key)s::text, 'kind', 'usage', 'currency', 'USD', 'actor', 'test',
           'capture_hold', h.hold_id, 'lines', jsonb_build_array(
               jsonb_build_object('account', %(wallet)s::bigint, 'amount', '-1'),
               jsonb_build_object('account', %(revenue)s::bigint, 'amount', '1')))))
         FROM hold_create(%(wallet)s, 2, 'USD', %(key)s, '1 hour', 'test') h""",
    """SELECT credit_grant_create(%(wallet)s, %(promo)s, 'promotional', 1, 'USD', 50, clock_timestamp()
                               + interval '1 second', %(key)s, '', 'test')""",
    "SELECT grant_expire_due(10)",
    "SELECT reverse_journal(%(journal)s, 'test', 'test')",
    "SELECT hold_create(%(wallet)s, 1, 'USD', %(key)s, '1 microsecond', 'test'), hold_expire_due(10)",
    "SELECT grant_recognise(10)",
]
CREDIT = 1_000_000


@pytest.fixture
def server(django_db_setup: None, django_db_blocker: Any) -> Iterator[EmbeddedPostgres]:
    """A durable server of the test's own, migrated, with Django pointed at it: the others' does not sync."""
    with tempfile.TemporaryDirectory(prefix="apex-crash-") as folder, django_db_blocker.unblock():
        home = Path(folder)
        home.chmod(0o711)
        server = EmbeddedPostgres(data=home / "pg", sockets=home / "s", durable=True)
        # Migrating is not what is tested here, so it need not wait for the disk.
        start(replace(server, durable=False))
        server.provision()
        with pointed_at(server, OWNER_ROLE):
            call_command("migrate", verbosity=0)
        server.stop()
        try:
            with pointed_at(server, APP_ROLE):
                yield server
        finally:
            server.stop()


@contextmanager
def pointed_at(server: EmbeddedPostgres, role: str) -> Iterator[None]:
    """Django's default connection, in every thread."""
    configs = (connections.settings["default"], connections["default"].settings_dict)
    before = [dict(config) for config in configs]
    connections.close_all()
    for config in configs:
        config.update(HOST=str(server.sockets), NAME=DATABASE, USER=role)
    try:
        yield
    finally:
        connections.close_all()
        for config, old in zip(configs, before, strict=True):
            config.update(old)


def start(server: EmbeddedPostgres) -> subprocess.Popen[bytes]:
    process = server.spawn(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    server.wait_ready(process)
    return process


class Poster(threading.Thread):
    """Spends 1 again and again until the server is gone; knows what was confirmed to it."""

    def __init__(self, url: str, name: str, wallet: int, revenue: int, promo: int) -> None:
        super().__init__()
        self._url, self._key = url, name
        self._accounts = {"wallet": wallet, "revenue": revenue, "promo": promo}
        self.confirmed: list[str] = []

    def run(self) -> None:
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                for number in range(CREDIT):
                    key = f"{self._key} {number}"
                    row = connection.execute(
                        POST, [key, self._accounts["wallet"], self._accounts["revenue"]]
                    ).fetchone()
                    self.confirmed.append(key)
                    other = OTHERS[number % len(OTHERS)]
                    connection.execute(other, {"key": key, "journal": row[0], **self._accounts})
        except psycopg.OperationalError as error:
            if error.sqlstate == "40P01":  # a deadlock, which must not be
                raise


def hledger_agrees(tmp_path: Path) -> bool:
    books = tmp_path / "books.journal"
    call_command("ledger_export", "--hledger", "--output", str(books))
    if shutil.which("hledger") is None:
        return True
    return (
        subprocess.run(["hledger", "check", "-s", "-f", str(books)], check=False, timeout=60).returncode == 0
    )


def test_kill_9_of_postgresql_loses_nothing_confirmed_and_keeps_the_books_true(server, tmp_path):
    process = start(server)
    wallet = make_wallet(str(CREDIT))
    revenue, promo = (
        platform_account(code=code, currency="USD") for code in ("usage_revenue", "promo_deferred")
    )
    confirmed: set[str] = set()
    for crash in range(2):
        posters = [
            Poster(server.url(APP_ROLE), f"poster {crash} {n}", wallet.pk, revenue.pk, promo.pk)
            for n in range(4)
        ]
        for poster in posters:
            poster.start()
        enough, deadline = random.randint(20, 60), time.monotonic() + 30
        while any(len(poster.confirmed) < enough for poster in posters):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        for poster in posters:
            poster.join(10)
        connections.close_all()

        process = start(server)
        confirmed.update(key for poster in posters for key in poster.confirmed)
        booked = set(Journal.objects.filter(idem_scope="crash").values_list("idem_key", flat=True))
        assert confirmed <= booked
        # One posting of each poster may have been committed without the answer arriving.
        assert len(booked) - len(confirmed) <= len(posters) * (crash + 1)
        assert [result.name for result in [*verify_books(), rebuild_and_compare()] if not result.ok] == []
    reversed_ones = Journal.objects.filter(idem_scope="reversal").count()
    assert reversed_ones > 0
    assert (
        account_balance(revenue)
        == len(booked) - reversed_ones + Journal.objects.filter(idem_scope="crash.held").count()
    )
    assert hledger_agrees(tmp_path)
