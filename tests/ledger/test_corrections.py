"""Adjustments, write-offs, exchanges, and periods closed and opened again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from djmoney.money import Money

from ledger.errors import BadPosting, IdempotencyConflict, InsufficientFunds, PeriodClosed
from ledger.models import Account, AuditEvent, Journal
from ledger.selectors import account_balance, balance_as_of, entries_page, trial_balance, wallet
from ledger.services import (
    JournalRequest,
    adjust,
    advance_totals,
    close_period,
    create_hold,
    exchange,
    platform_account,
    post_journal,
    post_journals,
    reopen_period,
    reverse,
    reverse_journal,
    void_hold,
    write_off,
)
from tests.ledger.conftest import make_wallet, spend

pytestmark = pytest.mark.django_db
TODAY = datetime.now(UTC)


def charge(team: Account, amount: str, key: str, **more: object):
    revenue = platform_account(code="usage_revenue", currency="USD")
    return post_journal(
        scope="test", key=key, kind="usage", currency="USD", lines=spend(team, revenue, amount), actor="test", **more
    )  # fmt: skip


def test_an_adjustment_needs_a_reason_and_is_in_the_audit_trail_once():
    team = make_wallet("10")
    for _ in range(2):
        adjust(account=team, amount=Money(-3, "USD"), against="rounding", key="a", reason="typo", actor="ann")
    assert (wallet(team.code).posted, AuditEvent.objects.filter(action="books.adjusted").count()) == (7, 1)
    with pytest.raises(ValueError, match="reason"):
        adjust(account=team, amount=Money(1, "USD"), against="rounding", key="b", reason=" ", actor="ann")
    with pytest.raises(InsufficientFunds):
        adjust(account=team, amount=Money(-8, "USD"), against="rounding", key="c", reason="typo", actor="ann")


def test_a_debt_is_written_off_and_never_more_than_it():
    team = make_wallet("1")
    hold = create_hold(
        account=team, amount=Money(1, "USD"), key="h", ttl=timedelta(minutes=1), actor="test"
    ).hold_id
    void_hold(hold_id=hold)
    revenue = platform_account(code="usage_revenue", currency="USD")
    post_journals(
        [JournalRequest("test", "d", "usage", "USD", spend(team, revenue, "5"), "test", capture_hold=hold)]
    )
    facts = {"account": team, "reason": "bankrupt", "actor": "ann"}
    with pytest.raises(BadPosting, match="more than the debt of 4"):
        write_off(amount=Money(5, "USD"), key="w", **facts)
    first = write_off(amount=Money(3, "USD"), key="w", **facts)
    assert write_off(amount=Money(3, "USD"), key="w", **facts).journal_id == first.journal_id
    assert account_balance(Account.objects.get(code=f"customer_receivable:{team.pk}")) == -1
    assert account_balance(platform_account(code="bad_debt", currency="USD")) == -3
    with pytest.raises(BadPosting):
        write_off(amount=Money(1, "USD"), key="x", account=make_wallet(), reason="none", actor="ann")


def test_an_exchange_is_two_journals_and_is_taken_back_as_two():
    dollars, euros = make_wallet("10"), make_wallet(currency="EUR")
    facts = {"source": dollars, "target": euros, "bought": Money("4.5", "EUR"), "actor": "test"}
    done = exchange(key="x", sold=Money(5, "USD"), **facts)
    assert exchange(key="x", sold=Money(5, "USD"), **facts).replayed
    assert (wallet(dollars.code).posted, wallet(euros.code).posted) == (5, Decimal("4.5"))
    fx = [
        account_balance(platform_account(code="fx_brokerage", currency=currency))
        for currency in ("USD", "EUR")
    ]
    assert fx == [5, Decimal("-4.5")]
    with pytest.raises(IdempotencyConflict):
        exchange(key="x", sold=Money(6, "USD"), **facts)
    with pytest.raises(InsufficientFunds):
        exchange(key="y", sold=Money(6, "USD"), **facts)
    assert Journal.objects.filter(group_id=done.group_id).count() == 2
    reverse_journal(journal_id=done.to_journal_id, reason="wrong rate", actor="ann")
    assert (wallet(dollars.code).posted, wallet(euros.code).posted) == (10, 0)
    with pytest.raises(ValueError, match="amount in EUR"):
        exchange(
            key="z", source=dollars, sold=Money(1, "EUR"), target=euros, bought=Money(1, "EUR"), actor="a"
        )


def test_a_period_is_closed_opened_again_and_closed_again():
    team = make_wallet("10")
    yesterday, before = TODAY - timedelta(days=1), TODAY - timedelta(days=2)
    close_period(through=yesterday.date(), actor="ann", note="November")
    with pytest.raises(PeriodClosed):
        charge(team, "1", "a", effective_at=yesterday)
    with pytest.raises(BadPosting, match="closed through"):
        close_period(through=before.date(), actor="ann")
    with pytest.raises(BadPosting, match="reason"):
        reopen_period(through=before.date(), actor="ann", reason="")
    with pytest.raises(BadPosting, match="no closed day"):
        reopen_period(through=yesterday.date(), actor="ann", reason="late invoice")
    reopen_period(through=before.date(), actor="ann", reason="late invoice")
    charge(team, "1", "a", effective_at=yesterday)
    with pytest.raises(PeriodClosed):
        charge(team, "1", "b", effective_at=before)
    close_period(through=yesterday.date(), actor="ann")
    assert charge(team, "1", "a", effective_at=yesterday).replayed
    actions = AuditEvent.objects.filter(object_type="period_close").order_by("id")
    assert [event.action for event in actions] == ["period.closed", "period.reopened", "period.closed"]
    assert actions[1].after["note"] == "late invoice"


def test_a_reversal_from_the_back_office_is_in_the_audit_trail():
    team = make_wallet("10")
    posted = charge(team, "1", "a")
    journal = Journal.objects.get(pk=posted.journal_id)
    reverse(journal=journal, reason="wrong price", actor="ann", request_id="r-1")
    event = AuditEvent.objects.get(action="journal.reversed")
    assert (event.after, event.request_id) == (
        {"reverses": str(journal.public_id), "reason": "wrong price"},
        "r-1",
    )


def test_balances_at_a_moment_and_of_all_accounts():
    team = make_wallet("10")
    charge(team, "1", "past", effective_at=TODAY - timedelta(days=5))
    charge(team, "2", "now")
    assert balance_as_of(account_id=team.pk, moment=TODAY - timedelta(days=3)) == -1
    for _ in range(2):
        rows = {row.code: row.posted for row in trial_balance() if row.currency == "USD"}
        assert (rows[team.code], rows["usage_revenue:USD"], sum(rows.values())) == (7, 3, 0)
        advance_totals()


def test_a_platform_account_has_running_balances_before_and_after_a_total():
    team, revenue = make_wallet("100"), platform_account(code="usage_revenue", currency="USD")
    for number in range(3):
        charge(team, "1", f"a{number}")
    advance_totals()
    for number in range(3):
        charge(team, "1", f"b{number}")
    pages = [entries_page(account_id=revenue.pk, limit=2)]
    while pages[-1].next_cursor is not None:
        pages.append(entries_page(account_id=revenue.pk, limit=2, before=pages[-1].next_cursor))
    assert [entry.balance for page in pages for entry in page.entries] == [6, 5, 4, 3, 2, 1]
