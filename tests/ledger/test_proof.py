"""The books made again, read by hledger, and proved every night."""

from __future__ import annotations

import csv
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection

from apex.local.postgres import SUPERUSER
from ledger.audit import seal_events
from ledger.export import hledger_account
from ledger.models import Account, Verification
from ledger.rebuild import rebuild_and_compare
from ledger.selectors import account_balance, last_proof
from ledger.services import Line, open_wallet, platform_account, post_journal, record_audit_event
from ledger.tasks import verify_books
from tests.ledger.conftest import make_wallet
from tests.services import database_url

needs_hledger = pytest.mark.skipif(
    shutil.which("hledger") is None, reason="hledger is not installed (sudo apt-get install hledger)"
)


def tamper(name: str, *statements: str) -> None:
    with psycopg.connect(database_url(name, SUPERUSER)) as evil:
        evil.execute("ALTER TABLE ledger_entries DISABLE TRIGGER ALL")
        evil.execute("ALTER TABLE audit_events DISABLE TRIGGER ALL")
        for statement in statements:
            evil.execute(statement)


def test_the_balances_come_out_the_same_when_they_are_made_again(books):
    result = rebuild_and_compare()
    assert (result.name, result.ok, result.rows) == ("rebuilt_balances", True, [])


@pytest.mark.parametrize(
    ("attack", "row"),
    [
        ("UPDATE ledger_balance SET posted = posted + 1 WHERE account_id = {w}", ("posted", "rebuilt_posted", 1)),
        ("UPDATE ledger_balance SET held = held - 1 WHERE account_id = {w}", ("held", "rebuilt_held", -1)),
        # It balances, sums and balance rows agree: but the wallet spent before it had anything.
        (
            """UPDATE ledger_entries SET id = -id WHERE account_id = {w} AND amount < 0""",
            ("floor", "lowest", 1),
        ),
    ],
)  # fmt: skip
def test_what_differs_is_named(books, fresh_database, attack, row):
    tamper(fresh_database, attack.format(**books))
    kept, rebuilt, difference = row
    result = rebuild_and_compare()
    assert not result.ok
    assert [found["account_id"] for found in result.rows] == [books["w"]]
    assert result.rows[0][kept] - result.rows[0][rebuilt] >= difference


def test_a_wallet_without_a_balance_row_is_named(books, fresh_database):
    tamper(fresh_database, "DELETE FROM ledger_balance WHERE account_id = {w}".format(**books))
    [row] = rebuild_and_compare().rows
    assert (row["account_id"], row["posted"]) == (books["w"], None)


def export(path: Path) -> Path:
    call_command("ledger_export", "--hledger", "--output", str(path))
    return path


def hledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["hledger", *arguments], capture_output=True, text=True, timeout=60, env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin:/usr/local/bin"},
    )  # fmt: skip


def balances(path: Path) -> dict[str, Decimal]:
    answer = hledger("balance", "-f", str(path), "--flat", "--empty", "--no-total", "-O", "csv")
    assert answer.returncode == 0, answer.stderr
    rows = list(csv.reader(StringIO(answer.stdout)))[1:]
    return {account: Decimal(amount.split()[0].replace(",", "")) for account, amount in rows}


@pytest.fixture
def varied_books(books) -> None:
    """More days, another currency, billionths, and a name that is full of hledger's own syntax."""
    euro = open_wallet(code="customer_credit:é;  (x) = [y] | *!@", owner="team", currency="EUR")
    bank = platform_account(code="bank", currency="EUR")
    today = datetime.now(UTC)
    for days, amount in ((3, "0.000000001"), (1, "999999999999990.999999999"), (3, "2.5"), (0, "1")):
        post_journal(
            scope="test",
            key=f"{days} {amount}",
            kind="credit; = (paid)",
            currency="EUR",
            lines=[Line(bank.pk, -Decimal(amount)), Line(euro.pk, Decimal(amount))],
            actor="test",
            effective_at=today - timedelta(days=days),
        )


@needs_hledger
def test_hledger_agrees_with_every_balance(varied_books, tmp_path):
    path = export(tmp_path / "books.journal")
    check = hledger("check", "-s", "-f", str(path))
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
    ours = {
        hledger_account(account.type, account.code): -account_balance(account)
        for account in Account.objects.select_related("balance")
    }
    assert {name: amount for name, amount in ours.items() if amount} == {
        name: amount for name, amount in balances(path).items() if amount
    }
    out = StringIO()
    call_command("ledger_export", "--hledger", stdout=out)
    assert out.getvalue() == path.read_text()


@needs_hledger
@pytest.mark.parametrize(
    "attack",
    [
        "UPDATE ledger_balance SET posted = posted + 0.000000001 WHERE account_id = {w}",
        "UPDATE ledger_entries SET amount = amount + 1 WHERE id = (SELECT min(id) FROM ledger_entries)",
        "DELETE FROM ledger_entries WHERE journal_id = (SELECT min(journal_id) FROM ledger_entries)",
    ],
)
def test_hledger_finds_books_that_are_wrong(books, fresh_database, tmp_path, attack):
    assert hledger("check", "-s", "-f", str(export(tmp_path / "good.journal"))).returncode == 0
    tamper(fresh_database, attack.format(**books))
    check = hledger("check", "-s", "-f", str(export(tmp_path / "bad.journal")))
    assert check.returncode != 0
    assert "balance assertion" in check.stderr or "could not balance" in check.stderr


@needs_hledger
def test_empty_books_can_be_exported(fresh_database, tmp_path):
    assert hledger("check", "-s", "-f", str(export(tmp_path / "books.journal"))).returncode == 0


def test_long_books_are_exported_whole(fresh_database, monkeypatch):
    monkeypatch.setattr("ledger.export._PAGE", 4)
    for _ in range(4):
        make_wallet("1")
    out = StringIO()
    call_command("ledger_export", "--hledger", stdout=out)
    assert out.getvalue().count("; journal ") == 4
    assert out.getvalue().count("  1.000000000 USD") == 4


def test_the_nightly_proof_is_stored(books, settings, tmp_path):
    settings.VAR_DIR = tmp_path
    assert last_proof() is None
    assert verify_books() is True
    proof = last_proof()
    assert proof is not None
    assert (proof.ok, proof.failed) == (True, [])
    names = {check["name"] for check in Verification.objects.get().checks}
    assert {"balances_equal_entries", "rebuilt_balances", "audit_trail"} <= names


def test_the_nightly_proof_names_what_is_wrong(books, fresh_database, settings, tmp_path, caplog):
    settings.VAR_DIR = tmp_path
    record_audit_event(actor="a", action="b", object_type="c", object_id="d")
    seal_events()
    tamper(
        fresh_database,
        "UPDATE ledger_balance SET posted = posted + 1 WHERE account_id = {w}".format(**books),
        "UPDATE audit_events SET actor = 'somebody'",
    )
    assert verify_books() is False
    proof = last_proof()
    assert proof is not None
    assert (proof.ok, proof.failed) == (False, ["balances_equal_entries", "rebuilt_balances", "audit_trail"])
    assert "the books are wrong: rebuilt_balances" in caplog.text
    [trail] = [check for check in Verification.objects.get().checks if check["name"] == "audit_trail"]
    assert trail["rows"][0]["kind"] == "event_changed"


@pytest.mark.django_db
def test_a_rebuild_inside_a_transaction_can_be_repeated():
    for _ in range(2):
        assert rebuild_and_compare().ok
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass('public.rebuilt_balance')")
        assert cursor.fetchone() == (None,)
