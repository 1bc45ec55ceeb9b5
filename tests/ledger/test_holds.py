"""Holds: opened once, closed once, and never more than there is."""

from __future__ import annotations

import uuid
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import connection
from djmoney.money import Money

from ledger import tasks
from ledger.errors import BadPosting, HoldNotOpen, IdempotencyConflict, InsufficientFunds, OverCapture
from ledger.models import Account, Hold
from ledger.selectors import wallet
from ledger.services import (
    PlacedHold,
    capture_hold,
    create_hold,
    expire_due_holds,
    platform_account,
    void_hold,
)
from tests.ledger.conftest import make_wallet, spend

pytestmark = pytest.mark.django_db
MINUTE = timedelta(minutes=1)


def hold(team: Account, amount: str, *, key: str = "", ttl: timedelta = MINUTE) -> PlacedHold:
    return create_hold(
        account=team, amount=Money(amount, "USD"), key=key or uuid.uuid4().hex, ttl=ttl, actor="test"
    )


def capture(hold_id: int, team: Account, revenue: Account, amount: str, key: str = "c"):
    return capture_hold(
        hold_id=hold_id, scope="test", key=key, kind="usage", currency="USD",
        lines=spend(team, revenue, amount), actor="test",
    )  # fmt: skip


def run(query: str, *params: object) -> object:
    with connection.cursor() as cursor:
        cursor.execute(query, params)
        return cursor.fetchone()[0]


def test_it_works(revenue):
    team = make_wallet("10")
    placed = hold(team, "4")
    assert placed.available == 6
    assert (wallet(team.code).posted, wallet(team.code).held, wallet(team.code).available) == (10, 4, 6)
    capture(placed.hold_id, team, revenue, "1.5")
    assert (wallet(team.code).posted, wallet(team.code).held) == (Decimal("8.5"), 0)


def test_holds_do_not_add_up_to_more_than_there_is():
    team = make_wallet("5000")
    for _ in range(5):
        hold(team, "1000")
    with pytest.raises(InsufficientFunds) as caught:
        hold(team, "1000")
    assert (caught.value.available, caught.value.shortfall) == (0, 1000)


def test_the_same_hold_again_is_the_same_hold():
    team, other = make_wallet("10"), make_wallet("10")
    first = hold(team, "4", key="k")
    again = hold(team, "4", key="k")
    assert (again.hold_id, again.replayed, again.available) == (first.hold_id, True, 6)
    for different in (lambda: hold(team, "5", key="k"), lambda: hold(other, "4", key="k")):
        with pytest.raises(IdempotencyConflict):
            different()
    with pytest.raises(IdempotencyConflict) as caught:
        hold(team, "4", key="k", ttl=2 * MINUTE)
    assert caught.value.fields == ["ttl"]


def test_a_hold_is_voided_once():
    team = make_wallet("10")
    placed = hold(team, "4", key="k")
    assert [void_hold(hold_id=placed.hold_id), void_hold(hold_id=placed.hold_id)] == [True, False]
    assert wallet(team.code).held == 0
    hold(team, "4", key="k2")
    assert [run("SELECT hold_void_by_key('k2')"), run("SELECT hold_void_by_key('k2')")] == [True, False]
    assert run("SELECT hold_void_by_key('never')") is False
    assert wallet(team.code).available == 10


def test_a_closed_hold_is_not_captured_and_an_open_one_not_above_its_amount(revenue):
    team = make_wallet("10")
    placed = hold(team, "4")
    with pytest.raises(OverCapture):
        capture(placed.hold_id, team, revenue, "4.000000001")
    first = capture(placed.hold_id, team, revenue, "4")
    assert capture(placed.hold_id, team, revenue, "4").journal_id == first.journal_id
    with pytest.raises(HoldNotOpen):
        capture(placed.hold_id, team, revenue, "1", key="another")
    with pytest.raises(HoldNotOpen, match="no hold 999999"):
        capture(999999, team, revenue, "1", key="third")
    assert (wallet(team.code).posted, void_hold(hold_id=placed.hold_id)) == (6, False)


def test_holds_expire_by_the_clock_and_give_their_credit_back():
    team = make_wallet("10")
    late = hold(team, "4", ttl=timedelta(microseconds=1))
    kept = hold(team, "3")
    assert expire_due_holds(limit=10) == 1
    assert dict(Hold.objects.values_list("pk", "state")) == {late.hold_id: "expired", kept.hold_id: "open"}
    assert wallet(team.code).held == 3


def test_the_sweep_works_in_batches_until_nothing_is_due(monkeypatch):
    monkeypatch.setattr(tasks, "EXPIRE_LIMIT", 2)
    team = make_wallet("10")
    for _ in range(5):
        hold(team, "1", ttl=timedelta(microseconds=1))
    assert (tasks.expire_holds(), wallet(team.code).held) == (5, 0)


@pytest.mark.parametrize("amount", ["0", "-1", "0.0000000001", "1000000000000000"])
def test_odd_amounts_are_refused(amount):
    with pytest.raises(BadPosting, match="amount must be above zero"):
        hold(make_wallet("10"), amount)


def test_a_hold_needs_a_wallet_in_its_currency():
    with pytest.raises(BadPosting, match="no wallet in USD"):
        hold(platform_account(code="bank", currency="USD"), "1")
    with pytest.raises(BadPosting, match="no wallet in USD"):
        hold(make_wallet("1", currency="EUR"), "1")
    with pytest.raises(BadPosting, match="time to live"):
        hold(make_wallet("1"), "1", ttl=timedelta(0))
