"""Buying credit: credited exactly once, whatever is lost, doubled or comes late."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import connections
from django.db.models.functions import Now
from djmoney.money import Money

from ledger import tasks
from ledger.errors import IdempotencyConflict
from ledger.models import Account, InboundEvent, Settlement, TopUp
from ledger.paypal import orders
from ledger.paypal.client import PayPalOrders
from ledger.paypal.events import note_return
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable
from ledger.paypal.orders import settle_top_up, start_top_up, unfinished_top_ups
from ledger.selectors import account_balance, wallet
from ledger.services import platform_account
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet


class Crash(BaseException):
    """The process ends here."""


def buy(team: Account, amount: str = "25.00", key: str = "") -> TopUp:
    return start_top_up(
        wallet_code=team.code, amount=Money(amount, team.currency), actor="user:ann",
        idempotency_key=key or uuid.uuid4().hex,
        return_url="https://shop.example/back", cancel_url="https://shop.example/cancelled",
    )  # fmt: skip


def pretend_nothing_happened_for(top_up: TopUp, time: timedelta) -> None:
    TopUp.objects.filter(pk=top_up.pk).update(changed_at=Now() - time)


def assert_credited_once(team: Account, paypal, amount: str = "25.00") -> None:
    assert len(paypal.captures()) == 1
    assert wallet(team.code).posted == Decimal(amount)
    assert Settlement.objects.count() == 1
    assert TopUp.objects.get().state == "settled"
    assert [result.name for result in verify_books() if not result.ok] == []


@pytest.fixture
def team(db) -> Account:
    return make_wallet()


def test_it_works(team, paypal):
    top_up = buy(team)
    assert (top_up.state, top_up.approve_url) == (
        "approving",
        f"{paypal.url}/checkoutnow?token={top_up.order_id}",
    )
    assert settle_top_up(top_up_id=top_up.pk).state == "approving"
    paypal.approve(top_up.order_id)
    assert settle_top_up(top_up_id=top_up.pk).state == "settled"
    assert_credited_once(team, paypal)
    settlement = Settlement.objects.get()
    # 25.00 at 3.49 % and 0.49.
    assert (settlement.gross.amount, settlement.fee, settlement.net) == (
        25,
        Decimal("1.36"),
        Decimal("23.64"),
    )
    assert account_balance(platform_account(code="paypal_clearing", currency="USD")) == Decimal("-23.64")
    assert account_balance(platform_account(code="processor_fees", currency="USD")) == Decimal("-1.36")


def test_the_same_purchase_again_is_the_same_order(team, paypal):
    first = buy(team, key="k")
    assert buy(team, key="k").order_id == first.order_id
    assert len(paypal.orders) == 1
    with pytest.raises(IdempotencyConflict):
        buy(team, amount="30.00", key="k")


@pytest.mark.parametrize("kind", ["error", "lost"])
def test_an_order_whose_answer_is_lost_is_placed_once(team, paypal, kind):
    paypal.break_("create", kind)
    with pytest.raises(GatewayUnavailable):
        buy(team, key="k")
    assert TopUp.objects.get().state == "started"
    assert buy(team, key="k").state == "approving"
    assert len(paypal.orders) == 1


@pytest.mark.parametrize("operation", ["get", "capture"])
@pytest.mark.parametrize("kind", ["error", "lost"])
def test_a_lost_answer_costs_nobody_money(team, paypal, operation, kind):
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    paypal.break_(operation, kind)
    with pytest.raises(GatewayUnavailable):
        settle_top_up(top_up_id=top_up.pk)
    assert wallet(team.code).posted == 0
    settle_top_up(top_up_id=top_up.pk)
    assert_credited_once(team, paypal)


@pytest.mark.parametrize("step", ["settle_capture", "_apply", "_captured_order"])
def test_a_crash_between_capture_and_booking_is_made_good_by_the_sweep(
    team, paypal, monkeypatch, eager_tasks, step
):
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    done = getattr(orders, step)

    def crash(*args, **kwargs):
        if step == "_captured_order":
            done(*args, **kwargs)  # the money is taken, nobody knows
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(orders, step, crash)
        with pytest.raises(Crash):
            settle_top_up(top_up_id=top_up.pk)
    assert len(paypal.captures()) == 1
    assert wallet(team.code).posted == 0
    pretend_nothing_happened_for(top_up, timedelta(minutes=1))
    tasks.sweep_top_ups()
    assert_credited_once(team, paypal)


def test_a_crash_after_the_booking_books_nothing_twice(team, paypal, monkeypatch):
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    booked = orders.settle_capture

    def crash(**kwargs):
        booked(**kwargs)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(orders, "settle_capture", crash)
        with pytest.raises(Crash):
            settle_top_up(top_up_id=top_up.pk)
    settle_top_up(top_up_id=top_up.pk)
    assert_credited_once(team, paypal)


def test_many_at_once_credit_once(fresh_database, paypal):
    team = make_wallet()
    top_up = buy(team)
    paypal.approve(top_up.order_id)

    def settle(_: int) -> None:
        try:
            settle_top_up(top_up_id=top_up.pk)
        finally:
            connections["default"].close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(settle, range(16)))
    assert_credited_once(team, paypal)


def test_a_pending_capture_is_credited_when_it_completes(team, paypal):
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    paypal.break_("capture", "pending")
    assert settle_top_up(top_up_id=top_up.pk).state == "pending"
    assert wallet(team.code).posted == 0
    paypal.complete(top_up.order_id)
    settle_top_up(top_up_id=top_up.pk)
    assert_credited_once(team, paypal)


def test_a_declined_capture_credits_nothing(team, paypal):
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    paypal.break_("capture", "pending")
    settle_top_up(top_up_id=top_up.pk)
    paypal.complete(top_up.order_id, declined=True)
    assert settle_top_up(top_up_id=top_up.pk).state == "failed"
    assert (wallet(team.code).posted, Settlement.objects.count()) == (0, 0)


def test_a_refused_payment_can_be_made_good_later(team, paypal):
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    paypal.break_("capture", "declined")
    refused = settle_top_up(top_up_id=top_up.pk)
    assert refused.state == "failed"
    assert "INSTRUMENT_DECLINED" in refused.failure
    settle_top_up(top_up_id=top_up.pk)
    assert_credited_once(team, paypal)


def test_a_capture_made_by_somebody_else_is_found(team, paypal):
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    PayPalOrders().capture_order(str(top_up.order_id), request_id="another")
    settle_top_up(top_up_id=top_up.pk)
    assert_credited_once(team, paypal)


def test_two_captures_at_once_by_different_ids_are_told_apart(team, paypal):
    order_id = str(buy(team).order_id)
    with pytest.raises(GatewayRefused) as caught:
        PayPalOrders().capture_order(order_id, request_id="early")
    assert caught.value.issue == "ORDER_NOT_APPROVED"
    paypal.approve(order_id)
    first = PayPalOrders().capture_order(order_id, request_id="one")
    assert PayPalOrders().capture_order(order_id, request_id="one") == first
    with pytest.raises(GatewayRefused) as caught:
        PayPalOrders().capture_order(order_id, request_id="two")
    assert caught.value.issue == "ORDER_ALREADY_CAPTURED"


def test_what_nobody_approves_ends_as_failed(team, paypal, eager_tasks):
    top_up = buy(team)
    TopUp.objects.filter(pk=top_up.pk).update(changed_at=Now() - timedelta(minutes=1))
    assert unfinished_top_ups(limit=10) == [top_up.pk]
    assert unfinished_top_ups(limit=10) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "GIVE_UP_AFTER", timedelta(microseconds=1))
        assert settle_top_up(top_up_id=top_up.pk).state == "failed"


def test_an_order_that_paypal_does_not_know_ends_as_failed(team, paypal):
    top_up = buy(team)
    del paypal.orders[str(top_up.order_id)]
    assert settle_top_up(top_up_id=top_up.pk).failure.startswith("INVALID_RESOURCE_ID")


@pytest.mark.parametrize(
    ("amount", "currency"), [("10.001", "USD"), ("0", "USD"), ("-5", "USD"), ("10.50", "JPY")]
)
def test_amounts_that_paypal_cannot_take_are_refused_before_anything_is_stored(paypal, db, amount, currency):
    team = make_wallet(currency=currency)
    with pytest.raises(ValueError, match=f"PayPal takes {currency} above zero"):
        buy(team, amount=amount)
    assert (TopUp.objects.count(), paypal.orders) == (0, {})


def test_a_purchase_in_another_currency_than_the_wallet_is_refused(team, paypal):
    with pytest.raises(ValueError, match="the wallet is in USD, not in EUR"):
        start_top_up(
            wallet_code=team.code, amount=Money("5", "EUR"), actor="a", idempotency_key="k", return_url="", cancel_url=""
        )  # fmt: skip


def test_a_currency_that_paypal_refuses_fails_at_once(db, paypal):
    team = make_wallet(currency="XAU")
    with pytest.raises(GatewayRefused, match="CURRENCY_NOT_SUPPORTED"):
        buy(team)
    assert TopUp.objects.get().state == "failed"


def test_paypal_away_or_with_wrong_credentials_says_so(team, paypal, settings):
    settings.PAYPAL_CLIENT_ID = ""
    with pytest.raises(GatewayUnavailable, match="check PAYPAL_CLIENT_ID"):
        buy(team)
    settings.PAYPAL_CLIENT_ID, settings.PAYPAL_STUB_URL = "stub", "http://127.0.0.1:9"
    with pytest.raises(GatewayUnavailable, match="did not answer") as caught:
        buy(team)
    assert "127.0.0.1" not in str(caught.value)


def test_a_token_that_paypal_forgot_is_replaced(team, paypal):
    buy(team)
    paypal._stub.tokens.clear()
    assert buy(team).order_id


def test_credit_bought_pays_debts_first(team, paypal):
    from ledger.services import JournalRequest, create_hold, post_journals, void_hold
    from tests.ledger.conftest import make_wallet, spend

    rich = make_wallet("1")
    revenue = platform_account(code="usage_revenue", currency="USD")
    hold = create_hold(account=rich, amount=Money(1, "USD"), key="h", ttl=timedelta(hours=1), actor="test")
    void_hold(hold_id=hold.hold_id)
    post_journals(
        [
            JournalRequest(
                "t", "k", "usage", "USD", spend(rich, revenue, "11"), "test", capture_hold=hold.hold_id
            )
        ]
    )
    top_up = buy(rich)
    paypal.approve(top_up.order_id)
    settle_top_up(top_up_id=top_up.pk)
    assert wallet(rich.code).posted == 15
    assert account_balance(Account.objects.get(code=f"customer_receivable:{rich.pk}")) == 0
    assert [result.name for result in verify_books() if not result.ok] == []


def test_coming_back_from_paypal_credits_nothing_by_itself(
    team, paypal, eager_tasks, django_capture_on_commit_callbacks
):
    top_up = buy(team)
    with django_capture_on_commit_callbacks(execute=True):
        note_return(order_id=str(top_up.order_id))
    assert wallet(team.code).posted == 0
    paypal.approve(top_up.order_id)
    for _ in range(2):
        with django_capture_on_commit_callbacks(execute=True):
            note_return(order_id=str(top_up.order_id))
    assert_credited_once(team, paypal)
    event = InboundEvent.objects.get()
    assert (event.channel, bytes(event.raw)) == ("paypal.return", str(top_up.order_id).encode())
    assert event.applied_at is not None
