"""kill -9 of PostgreSQL in the middle of postings: what was confirmed is there, and the books balance."""

from __future__ import annotations

import os
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
from ledger import selectors
from ledger.models import Journal
from ledger.services import platform_account
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet

POST = """
SELECT journal_id FROM ledger_post('crash', %s, 'usage', 'USD', jsonb_build_array(
    jsonb_build_object('account', %s::bigint, 'amount', '-1'), jsonb_build_object('account', %s::bigint, 'amount', '1')
), 'test')
"""
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

    def __init__(self, url: str, name: str, accounts: tuple[int, int]) -> None:
        super().__init__()
        self._url, self._key, self._accounts = url, name, accounts
        self.confirmed: list[str] = []

    def run(self) -> None:
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                for number in range(CREDIT):
                    key = f"{self._key} {number}"
                    connection.execute(POST, [key, *self._accounts])
                    self.confirmed.append(key)
        except psycopg.OperationalError:
            return


def test_kill_9_of_postgresql_loses_nothing_confirmed_and_keeps_the_books_true(server):
    process = start(server)
    wallet, revenue = make_wallet(str(CREDIT)), platform_account(code="usage_revenue", currency="USD")
    posters = [Poster(server.url(APP_ROLE), f"poster {n}", (wallet.pk, revenue.pk)) for n in range(4)]
    for poster in posters:
        poster.start()
    deadline = time.monotonic() + 20
    while any(len(poster.confirmed) < 25 for poster in posters):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    for poster in posters:
        poster.join(10)
    connections.close_all()

    start(server)
    confirmed = {key for poster in posters for key in poster.confirmed}
    booked = set(Journal.objects.filter(idem_scope="crash").values_list("idem_key", flat=True))
    assert confirmed <= booked
    # One posting of each poster may have been committed without the answer arriving.
    assert len(booked) - len(confirmed) <= len(posters)
    assert selectors.wallet(wallet.code).posted == CREDIT - len(booked)
    assert [result.name for result in verify_books() if not result.ok] == []
