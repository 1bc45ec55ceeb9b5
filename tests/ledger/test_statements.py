"""Monthly statements: every movement of the month, and balances that add up."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.models import Account
from ledger.selectors import wallet
from ledger.services import Line, platform_account, post_journal
from ledger.statement_files import as_csv, as_pdf
from ledger.statements import Month, months_of, statement
from tests.ledger.conftest import make_wallet

NOW = datetime.now(UTC)
THIS = Month.of(NOW.date())
FIRST = datetime(THIS.year, THIS.month, 1, tzinfo=UTC)
LAST_MONTH = Month.of(THIS.first - timedelta(days=1))


def book(team: Account, amount: str, *, at: datetime, kind: str = "usage", key: str) -> None:
    other = platform_account(code="usage_revenue" if kind == "usage" else "bank", currency=team.currency)
    post_journal(
        scope="test",
        key=f"{team.pk}:{key}",
        kind=kind,
        currency=team.currency,
        lines=[Line(team.pk, Decimal(amount)), Line(other.pk, -Decimal(amount))],
        actor="test",
        effective_at=at,
    )


@pytest.fixture
def team(db) -> Account:
    """Bought 10 last month and used some of it; bought 5 this month and used some more."""
    account = make_wallet()
    book(account, "10", at=FIRST - timedelta(days=3), kind="top_up", key="a")
    book(account, "-0.000000025", at=FIRST - timedelta(microseconds=1), key="b")
    book(account, "5", at=FIRST, kind="top_up", key="c")
    book(account, "-1.5", at=FIRST, key="d")
    book(account, "-0.25", at=FIRST, key="e")
    return account


def test_a_month_begins_where_the_one_before_ended(team):
    before, now = (statement(account=team, owner="Acme", month=month) for month in (LAST_MONTH, THIS))
    assert before.opening == 0
    assert before.closing == now.opening == Decimal("9.999999975")
    assert now.closing == wallet(team.code).posted == Decimal("13.249999975")


def test_a_days_charges_are_one_line_and_everything_else_is_told_by_itself(team):
    found = statement(account=team, owner="Acme", month=THIS)
    assert [(line.kind, line.lines, line.amount) for line in found.lines] == [
        ("top_up", 1, Decimal(5)),
        ("usage", 2, Decimal("-1.75")),
    ]
    assert found.lines[0].reference
    assert not found.lines[1].reference
    assert (found.credited, found.debited) == (Decimal(5), Decimal("1.75"))


def test_balances_run_from_opening_to_closing(team):
    for month in (LAST_MONTH, THIS):
        found = statement(account=team, owner="Acme", month=month)
        running = found.opening
        for line in found.lines:
            running += line.amount
            assert line.balance == running
        assert running == found.closing


def test_a_quiet_month_has_its_balances_and_nothing_else(db):
    account = make_wallet("3")
    found = statement(account=account, owner="Acme", month=LAST_MONTH)
    assert (found.opening, found.lines, found.closing) == (0, (), 0)


def test_nothing_of_another_wallet_is_told(team):
    other = make_wallet("7")
    found = statement(account=other, owner="Other", month=THIS)
    assert [line.amount for line in found.lines] == [Decimal(7)]


def test_a_platform_account_has_no_statement(team):
    with pytest.raises(ValueError, match="no wallet"):
        statement(account=platform_account(code="bank", currency="USD"), owner="x", month=THIS)


def test_the_csv_is_exact_and_adds_up(team):
    found = statement(account=team, owner="Acme", month=LAST_MONTH)
    rows = list(csv.DictReader(io.StringIO(as_csv(found).decode())))
    assert (rows[0]["kind"], rows[-1]["kind"]) == ("opening balance", "closing balance")
    amounts = [Decimal(row["amount"]) for row in rows[1:-1]]
    assert amounts == [Decimal(10), Decimal("-0.000000025")]
    assert Decimal(rows[0]["balance"]) + sum(amounts) == Decimal(rows[-1]["balance"])
    assert {row["currency"] for row in rows} == {"USD"}


def test_the_pdf_has_a_page_for_every_fifty_lines_or_so_and_survives_any_name(db):
    account = make_wallet()
    for n in range(60):
        book(account, "1", at=FIRST, kind="top_up", key=str(n))
    pdf = as_pdf(statement(account=account, owner="<b>Ärger & Söhne</b> 株式会社", month=THIS))
    assert pdf.startswith(b"%PDF-")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") >= 2


@pytest.mark.parametrize(
    "text", ["2026-13", "2026-00", "1999-12", "2026-1", "26-11", "2026/11", "²026-11", "", "9999-12"]
)
def test_what_is_no_month_is_refused_with_a_reason(text):
    with pytest.raises(ValueError, match=r"month|begun"):
        Month.parse(text)


@given(st.integers(2000, 2025), st.integers(1, 12))
def test_months_are_read_as_they_are_written_and_follow_each_other(year, month):
    found = Month(year, month)
    assert Month.parse(str(found)) == found
    assert found.following.first - timedelta(days=1) == found.last
    assert found < found.following


def test_months_reach_from_the_wallets_first_day_to_now(team):
    assert months_of(team) == [THIS]
