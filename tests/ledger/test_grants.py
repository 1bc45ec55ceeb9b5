"""Credit grants: drawn on in their order, given back to, and over when their time is over."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from djmoney.money import Money

from ledger import tasks
from ledger.errors import BadPosting, IdempotencyConflict, InsufficientFunds
from ledger.models import Account, AuditEvent, CreditGrant, GrantUse, TopUp
from ledger.selectors import account_balance, open_grants, wallet
from ledger.services import (
    JournalRequest,
    adjust,
    capture_hold,
    create_hold,
    expire_due_grants,
    grant_credit,
    platform_account,
    post_journal,
    post_journals,
    recognise_promotions,
    reverse_journal,
    revoke_grant,
    void_hold,
)
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet, spend

pytestmark = pytest.mark.django_db
Kind = CreditGrant.Kind


def grant(team: Account, kind: Kind, amount: str, *, days: float | None = None, **more: Any) -> int:
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    return grant_credit(
        account=team, kind=kind, amount=Money(amount, "USD"), key=more.pop("key", uuid.uuid4().hex),
        actor="test", expires_at=expires_at, **more,
    ).grant_id  # fmt: skip


def pay(team: Account, amount: str) -> int:
    revenue = platform_account(code="usage_revenue", currency="USD")
    return post_journal(
        scope="test", key=uuid.uuid4().hex, kind="usage", currency="USD", lines=spend(team, revenue, amount),
        actor="test",
    ).journal_id  # fmt: skip


def left(*grants: int) -> list[Decimal]:
    found = dict(CreditGrant.objects.filter(pk__in=grants).values_list("pk", "remaining"))
    return [found[pk] for pk in grants]


def let_expire(*grants: int) -> None:
    """As if their time had come: the terms are final for everybody, so a grant is made with little time instead."""
    deadline = datetime.now(UTC) + timedelta(seconds=20)
    while CreditGrant.objects.filter(pk__in=grants, expires_at__gt=database_clock()).exists():
        assert datetime.now(UTC) < deadline


def database_clock() -> datetime:
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        return cursor.fetchone()[0]


SOON = 2 / 86400  # days; enough for what comes before it on a busy machine


def wrong() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
    return [result.name for result in verify_books() if not result.ok]


def test_promotional_first_then_the_earliest_expiry_the_priority_and_the_age():
    team = make_wallet("10")
    late = grant(team, Kind.REFUND, "1", days=9)
    old, urgent = grant(team, Kind.SLA, "1"), grant(team, Kind.PAID, "1", priority=10)
    early, young = grant(team, Kind.PAID, "1", days=3), grant(team, Kind.SLA, "1")
    promised = grant(team, Kind.PROMOTIONAL, "1")
    order = [promised, early, late, urgent, old, young]
    assert [one.id for one in open_grants(account_id=team.pk)] == order
    journal = pay(team, "5.5")
    assert left(*order) == [0, 0, 0, 0, 0, Decimal("0.5")]
    assert list(GrantUse.objects.filter(journal_id=journal).values_list("grant_id", "amount")) == [
        (promised, 1), (early, 1), (late, 1), (urgent, 1), (old, 1), (young, Decimal("0.5")),
    ]  # fmt: skip
    pay(team, "3")
    now = wallet(team.code)
    assert (now.posted, now.granted, left(young)) == (Decimal("7.5"), 0, [0])
    assert wrong() == []


def test_a_reversal_gives_back_to_the_very_grants():
    team = make_wallet("10")
    first, second = grant(team, Kind.PROMOTIONAL, "2"), grant(team, Kind.SLA, "2")
    journal = pay(team, "5")
    grant(team, Kind.PROMOTIONAL, "7")
    reverse_journal(journal_id=journal, reason="test", actor="test")
    assert left(first, second) == [2, 2]
    unwound = GrantUse.objects.filter(amount__lt=0).values_list("grant_id", "amount")
    assert list(unwound) == [(second, -2), (first, -2)]
    assert (wallet(team.code).posted, wallet(team.code).granted) == (21, 11)
    assert wrong() == []


def test_expired_credit_cannot_be_spent_and_is_booked_out():
    team = make_wallet("1")
    promised, bought = grant(team, Kind.PROMOTIONAL, "5", days=SOON), grant(team, Kind.PAID, "3", days=SOON)
    pay(team, "1")
    let_expire(promised, bought)
    assert (wallet(team.code).posted, wallet(team.code).available) == (8, 1)
    with pytest.raises(InsufficientFunds) as caught:
        pay(team, "1.5")
    assert (caught.value.available, caught.value.shortfall) == (1, Decimal("0.5"))
    with pytest.raises(InsufficientFunds):
        create_hold(account=team, amount=Money("1.5", "USD"), key="h", ttl=timedelta(minutes=1), actor="test")
    assert (tasks.expire_grants(), tasks.expire_grants()) == (2, 0)
    assert (wallet(team.code).posted, wallet(team.code).granted, left(promised, bought)) == (1, 0, [0, 0])
    # What was paid for and is over is earned; a promise that is over never was anything.
    assert account_balance(platform_account(code="breakage", currency="USD")) == 3
    recognise_promotions(limit=10)
    assert account_balance(platform_account(code="promo_deferred", currency="USD")) == 0
    assert account_balance(platform_account(code="promo_expense", currency="USD")) == -1
    assert wrong() == []


def test_what_a_hold_has_set_aside_does_not_expire_under_it():
    team = make_wallet("1")
    promised = grant(team, Kind.PROMOTIONAL, "5", days=SOON)
    held = create_hold(account=team, amount=Money(4, "USD"), key="h", ttl=timedelta(minutes=1), actor="test")
    let_expire(promised)
    assert expire_due_grants(limit=10) == 1
    assert (wallet(team.code).posted, wallet(team.code).available, left(promised)) == (5, 0, [4])
    revenue = platform_account(code="usage_revenue", currency="USD")
    capture_hold(
        hold_id=held.hold_id, scope="test", key="c", kind="usage", currency="USD",
        lines=spend(team, revenue, "3"), actor="test",
    )  # fmt: skip
    assert (expire_due_grants(limit=10), wallet(team.code).posted, left(promised)) == (1, 1, [0])
    assert wrong() == []


def test_a_batch_draws_on_grants_too():
    team, other = make_wallet("10"), make_wallet("10")
    promised = grant(team, Kind.PROMOTIONAL, "3")
    revenue = platform_account(code="usage_revenue", currency="USD")
    requests = [
        JournalRequest("test", f"{n}", "usage", "USD", spend([team, other][n % 2], revenue, "1"), "test")
        for n in range(8)
    ]
    posted = post_journals(requests)
    assert len({one.journal_id for one in posted}) == 8
    assert (left(promised), wallet(team.code).posted, wallet(other.code).posted) == ([0], 9, 6)
    assert [one.journal_id for one in post_journals(requests)] == [one.journal_id for one in posted]
    assert wrong() == []


def test_a_grant_is_made_once_per_key_and_another_under_it_is_a_conflict():
    team = make_wallet()
    first = grant(team, Kind.SLA, "2", key="k")
    assert grant(team, Kind.SLA, "2", key="k") == first
    for changed in ({"kind": Kind.REFUND}, {"amount": "3"}, {"priority": 3}, {"note": "x"}):
        with pytest.raises(IdempotencyConflict):
            grant(**({"team": team, "kind": Kind.SLA, "amount": "2", "key": "k"} | changed))
    assert wallet(team.code).posted == 2
    assert AuditEvent.objects.filter(action="credit.granted").count() == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"amount": "0"}, "above zero"),
        ({"priority": 0}, "priority"),
        ({"days": -1}, "in the past"),
        ({"funding": "bank"}, "promo_deferred"),
    ],
)
def test_odd_terms_are_refused(changed, message):
    with pytest.raises(BadPosting, match=message):
        grant(**({"team": make_wallet(), "kind": Kind.PROMOTIONAL, "amount": "1"} | changed))


def test_a_grant_is_revoked_as_far_as_it_is_free():
    team = make_wallet()
    promised = grant(team, Kind.PROMOTIONAL, "5")
    pay(team, "1")
    held = create_hold(account=team, amount=Money(3, "USD"), key="h", ttl=timedelta(minutes=1), actor="test")
    assert revoke_grant(grant_id=promised, reason="fraud", actor="staff") == 1
    void_hold(hold_id=held.hold_id)
    assert revoke_grant(grant_id=promised, reason="fraud", actor="staff") == 3
    assert revoke_grant(grant_id=promised, reason="fraud", actor="staff") == 0
    assert (wallet(team.code).posted, left(promised)) == (0, [0])
    assert wrong() == []


def test_the_journal_of_a_grant_is_reversed_only_while_it_is_whole():
    team = make_wallet("10")
    whole, used = grant(team, Kind.SLA, "2"), grant(team, Kind.PROMOTIONAL, "2")
    pay(team, "1")
    journals = dict(CreditGrant.objects.values_list("pk", "journal_id"))
    reverse_journal(journal_id=journals[whole], reason="mistake", actor="staff")
    with pytest.raises(InsufficientFunds):
        reverse_journal(journal_id=journals[used], reason="mistake", actor="staff")
    assert (left(whole, used), wallet(team.code).posted) == ([0, 1], 11)
    assert wrong() == []


def test_what_was_paid_in_is_taken_back_out_of_paid_credit_only():
    team = make_wallet()
    grant(team, Kind.PROMOTIONAL, "5")
    paid = adjust(account=team, amount=Money(2, "USD"), against="bank", key="a", reason="wire", actor="staff")
    pay(team, "6")
    with pytest.raises(InsufficientFunds):
        reverse_journal(journal_id=paid.journal_id, reason="bounced", actor="staff")
    assert wrong() == []


def test_a_promotion_is_an_expense_as_it_is_used_and_not_when_it_is_given_back():
    team = make_wallet()
    grant(team, Kind.PROMOTIONAL, "5")
    expense = platform_account(code="promo_expense", currency="USD")
    journal = pay(team, "3")
    assert (recognise_promotions(limit=10), recognise_promotions(limit=10)) == (1, 0)
    assert account_balance(expense) == -3
    reverse_journal(journal_id=journal, reason="test", actor="test")
    tasks.recognise_promotions()
    assert account_balance(expense) == 0
    assert wrong() == []


def test_a_wallet_tells_what_is_pending_and_what_is_granted():
    team = make_wallet("1")
    grant(team, Kind.SLA, "2", note="outage of 3 May")
    for state, order in (("pending", "a"), ("approving", "b")):
        TopUp.objects.create(
            account=team,
            amount=Money(4, "USD"),
            idempotency_key=order,
            order_id=order,
            actor="test",
            state=state,
        )
    now = wallet(team.code)
    assert (now.posted, now.granted, now.pending, now.available) == (3, 2, 4, 3)
    assert open_grants(account_id=team.pk)[0].note == "outage of 3 May"
