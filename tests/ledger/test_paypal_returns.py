"""Refunds, reversals and disputes through the loopback PayPal: asked for, told of, doubled, late and in any order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from functools import cache

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from djmoney.money import Money

from ledger import tasks
from ledger.errors import BadPosting, IdempotencyConflict, InsufficientFunds
from ledger.models import Account, Dispute, Hold, InboundEvent, Refund, Settlement, TopUp
from ledger.paypal import disputes, events, orders, refunds
from ledger.paypal.client import PayPalOrders
from ledger.paypal.events import apply_event, dismiss_event, due_events, retry_event
from ledger.paypal.gateway import GatewayUnavailable
from ledger.paypal.ipn import inbox
from ledger.paypal.ipn.message import read_message
from ledger.paypal.orders import settle_top_up
from ledger.paypal.rails import gateway
from ledger.paypal.refunds import drive_refund, start_refund
from ledger.paypal.store import store_event
from ledger.selectors import account_balance, wallet
from ledger.services import platform_account, post_journal
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet, spend
from tests.ledger.test_paypal import Crash, buy


class Undo(Exception):
    """Rolls one order of events back."""


class Shop:
    """A wallet that bought 10 at the loopback PayPal: capture fee 0.84."""

    def __init__(self, paypal) -> None:
        self.paypal = paypal
        self.team = make_wallet()
        self.revenue = platform_account(code="usage_revenue", currency="USD")

    def order(self) -> TopUp:
        top_up = buy(self.team, "10.00")
        self.paypal.approve(top_up.order_id)
        return top_up

    def purchase(self) -> str:
        """Paid and booked; the capture's id."""
        top_up = self.order()
        settle_top_up(top_up_id=top_up.pk)
        return Settlement.objects.get(kind="capture", top_up=top_up).external_id

    def spend(self, amount: str) -> None:
        post_journal(
            scope="test", key=amount, kind="usage", currency="USD",
            lines=spend(self.team, self.revenue, amount), actor="test",
        )  # fmt: skip

    def webhook(self, kind: str, **resource: object) -> InboundEvent:
        """Delivered and applied, as the endpoint and the worker do."""
        raw = json.dumps({"event_type": kind, "resource": resource}).encode()
        event = store_event(channel=events.WEBHOOK, raw=raw, about="", verified=True)
        apply_event(event_id=event.pk)
        event.refresh_from_db()
        return event

    def notify(self, raw: bytes) -> InboundEvent:
        about = inbox.subject_of(read_message(raw))
        event = store_event(channel=events.IPN, raw=raw, about=about, verified=None)
        apply_event(event_id=event.pk)
        event.refresh_from_db()
        return event

    def ask(self, capture_id: str, amount: str = "4.00", key: str = "k", **more: object) -> Refund:
        return start_refund(
            capture_id=capture_id, amount=Money(amount, "USD"), reason="asked for it", actor="user:ann",
            idempotency_key=key, **more,
        )  # fmt: skip

    @property
    def credit(self) -> Decimal:
        return wallet(self.team.code).posted

    @property
    def available(self) -> Decimal:
        return wallet(self.team.code).available

    @property
    def debt(self) -> Decimal:
        receivable = Account.objects.filter(code=f"customer_receivable:{self.team.pk}").first()
        return -account_balance(receivable) if receivable else Decimal(0)

    @property
    def clearing(self) -> Decimal:
        return -account_balance(platform_account(code="paypal_clearing", currency="USD"))

    def at_paypal(self) -> Decimal:
        """What PayPal has of ours by its own list."""
        return sum(
            (Decimal(line["gross"]) + Decimal(line["fee"]) for line in self.paypal.store.movements),
            Decimal(0),
        )


def assert_sound(shop: Shop) -> None:
    assert [result.name for result in verify_books() if not result.ok] == []
    assert shop.clearing == shop.at_paypal()


@pytest.fixture
def shop(db, paypal) -> Iterator[Shop]:
    yield Shop(paypal)
    with connection.cursor() as cursor:  # every deferred guard too
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


# --- refunds that we ask for ---------------------------------------------------------------------


def test_a_refund_is_asked_for_proved_and_booked(shop):
    shop.paypal.set(fee_back="0.30")
    refund = shop.ask(shop.purchase(), note_to_payer="Sorry!")
    assert (refund.state, refund.failure) == ("completed", "")
    [sent] = shop.paypal.store.refunds.values()
    assert (sent["id"], sent["custom_id"], sent["note_to_payer"]) == (
        refund.external_id, str(refund.public_id), "Sorry!",
    )  # fmt: skip
    settlement = Settlement.objects.get(kind="refund")
    assert (settlement.gross.amount, settlement.fee, settlement.occurred_at is not None) == (
        4,
        Decimal("0.3"),
        True,
    )
    assert (shop.credit, shop.available, shop.debt) == (6, 6, 0)
    assert_sound(shop)


def test_several_partial_refunds_go_to_the_full_sum_and_no_further(shop):
    capture = shop.purchase()
    shop.ask(capture, "4.00", "a")
    shop.ask(capture, "6.00", "b")
    with pytest.raises(BadPosting, match="more than the 0 USD"):
        shop.ask(capture, "0.01", "c")
    assert (shop.credit, Refund.objects.count()) == (0, 2)
    assert_sound(shop)


def test_refunds_under_way_count_against_the_capture(shop):
    capture = shop.purchase()
    shop.paypal.break_("refund", "error")
    assert shop.ask(capture, "6.00", "a").state == "started"
    with pytest.raises(BadPosting, match="more than the 4 USD"):
        shop.ask(capture, "4.01", "b")


def test_the_same_key_is_the_same_refund(shop):
    capture = shop.purchase()
    first = shop.ask(capture, "4.00", "a")
    assert shop.ask(capture, "4.00", "a").pk == first.pk
    with pytest.raises(IdempotencyConflict):
        shop.ask(capture, "5.00", "a")
    assert len(shop.paypal.store.refunds) == 1


@pytest.mark.parametrize(
    ("amount", "problem"),
    [("10.001", ValueError), ("0.00", ValueError), ("-1.00", ValueError), ("10.01", BadPosting)],
)
def test_amounts_that_cannot_go_back_are_refused_before_anything_is_stored(shop, amount, problem):
    capture = shop.purchase()
    with pytest.raises(problem):
        shop.ask(capture, amount)
    assert (Refund.objects.count(), Hold.objects.count(), shop.paypal.store.refunds) == (0, 0, {})


def test_a_refund_needs_a_reason_a_known_capture_and_its_currency(shop):
    capture = shop.purchase()
    with pytest.raises(ValueError, match="reason"):
        start_refund(capture_id=capture, amount=Money(1, "USD"), reason=" ", actor="a", idempotency_key="k")
    with pytest.raises(Settlement.DoesNotExist):
        shop.ask("NONE")
    with pytest.raises(BadPosting, match="is in USD, not in EUR"):
        start_refund(capture_id=capture, amount=Money(1, "EUR"), reason="r", actor="a", idempotency_key="k")


def test_spent_credit_is_refunded_only_when_somebody_says_so_and_is_then_a_debt(shop):
    """Decided: the wallet pays what it has, the rest is owed; the next purchase pays it, or it is written off."""
    capture = shop.purchase()
    shop.spend("7")
    with pytest.raises(InsufficientFunds) as caught:
        shop.ask(capture, "10.00")
    assert caught.value.shortfall == 7
    assert shop.ask(capture, "10.00", allow_debt=True).state == "completed"
    assert (shop.credit, shop.debt) == (0, 7)
    assert_sound(shop)
    shop.purchase()
    assert (shop.credit, shop.debt) == (3, 0)
    assert_sound(shop)


def test_credit_that_is_going_back_cannot_be_spent_meanwhile(shop):
    capture = shop.purchase()
    shop.paypal.break_("refund", "pending")
    refund = shop.ask(capture)
    assert (refund.state, shop.credit, shop.available) == ("pending", 10, 6)
    shop.paypal.complete_refund(refund.external_id)
    assert drive_refund(refund_id=refund.pk).state == "completed"
    assert (shop.credit, shop.available) == (6, 6)
    assert_sound(shop)


def test_a_pending_refund_that_fails_gives_the_credit_free(shop):
    capture = shop.purchase()
    shop.paypal.break_("refund", "pending")
    refund = shop.ask(capture)
    shop.paypal.complete_refund(refund.external_id, failed=True)
    shop.webhook("PAYMENT.REFUND.FAILED", id=refund.external_id)
    refund.refresh_from_db()
    assert (refund.state, shop.credit, shop.available) == ("failed", 10, 10)
    assert_sound(shop)


def test_a_refund_that_was_booked_and_did_not_arrive_is_taken_back(shop):
    capture = shop.purchase()
    shop.paypal.set(fee_back="0.30")
    refund = shop.ask(capture)
    shop.paypal.complete_refund(refund.external_id, failed=True)
    for _ in range(2):
        shop.webhook("PAYMENT.REFUND.FAILED", id=refund.external_id, again=_)
    refund.refresh_from_db()
    assert (refund.state, shop.credit) == ("failed", 10)
    assert Settlement.objects.filter(kind="refund_failed").count() == 1
    assert shop.ask(capture, "10.00", "again").state == "completed"
    assert_sound(shop)


def test_a_refused_refund_says_why_and_holds_nothing(shop):
    capture = shop.purchase()
    shop.paypal.break_("refund", "declined")
    refund = shop.ask(capture)
    assert (refund.state, shop.available) == ("failed", 10)
    assert "REFUND_FAILED_INSUFFICIENT_FUNDS" in refund.failure
    assert_sound(shop)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("refund", "error"),
        ("refund", "lost"),
        ("refund", "busy"),
        ("get_refund", "error"),
        ("get_refund", "lost"),
    ],
)
def test_a_lost_answer_sends_the_money_once(shop, eager_tasks, monkeypatch, operation, kind):
    capture = shop.purchase()
    shop.paypal.break_(operation, kind)
    refund = shop.ask(capture)
    assert refund.state in Refund.UNFINISHED
    assert shop.available == 6
    monkeypatch.setattr(refunds, "LOOK_AGAIN_AFTER", timedelta(0))
    tasks.sweep_refunds()
    refund.refresh_from_db()
    assert (refund.state, len(shop.paypal.store.refunds), shop.credit) == ("completed", 1, 6)
    assert_sound(shop)


@pytest.mark.parametrize("step", ["_send", "book_return"])
def test_a_crash_at_any_step_sends_and_books_once(shop, eager_tasks, monkeypatch, step):
    capture = shop.purchase()
    done: Callable[..., object] = getattr(refunds, step)

    def crash(*args, **kwargs):
        done(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(refunds, step, crash)
        with pytest.raises(Crash):
            shop.ask(capture)
    monkeypatch.setattr(refunds, "LOOK_AGAIN_AFTER", timedelta(0))
    tasks.sweep_refunds()
    assert Refund.objects.get().state == "completed"
    assert (len(shop.paypal.store.refunds), shop.credit) == (1, 6)
    assert_sound(shop)


def test_a_request_id_that_paypal_has_forgotten_is_not_used_again(shop, monkeypatch):
    """After 45 days the same call would send the money a second time."""
    capture = shop.purchase()
    shop.paypal.break_("refund", "lost")
    refund = shop.ask(capture)
    monkeypatch.setattr(refunds, "LOOK_AGAIN_AFTER", timedelta(0))
    monkeypatch.setattr(refunds, "ASK_AGAIN_WITHIN", timedelta(0))
    shop.paypal.store.answers.clear()
    assert drive_refund(refund_id=refund.pk).state == "completed"  # found among the order's refunds
    assert len(shop.paypal.store.refunds) == 1
    other = shop.ask(capture, "1.00", "other")
    assert "TOO_LATE_TO_REPEAT" in drive_refund(refund_id=other.pk).failure
    assert len(shop.paypal.store.refunds) == 1


def test_the_intent_is_there_before_paypal_is_asked(fresh_database, paypal, monkeypatch):
    shop = Shop(paypal)
    capture = shop.purchase()
    seen: list[int] = []
    send = refunds._send

    def look(rail, refund):
        assert not connection.in_atomic_block
        seen.append(Refund.objects.filter(pk=refund.pk).count())
        return send(rail, refund)

    monkeypatch.setattr(refunds, "_send", look)
    shop.ask(capture)
    assert seen == [1]


# --- what PayPal tells ---------------------------------------------------------------------------


def test_a_refund_on_paypals_own_pages_is_booked_when_it_is_told(shop):
    capture = shop.purchase()
    shop.spend("7")
    refund_id = shop.paypal.refund_outside(capture, "10.00")
    event = shop.webhook("PAYMENT.CAPTURE.REFUNDED", id=refund_id, amount={"value": "999.00"})
    assert (event.error, event.parked_at) == ("", None)
    assert (shop.credit, shop.debt) == (0, 7)
    assert_sound(shop)


def test_a_chargeback_and_its_end(shop):
    capture = shop.purchase()
    shop.spend("7")
    reversal = shop.paypal.reverse(capture)
    shop.webhook("PAYMENT.CAPTURE.REVERSED", id=reversal)
    assert Settlement.objects.get(kind="reversal").external_id == reversal
    assert (shop.credit, shop.debt) == (0, 7)
    assert_sound(shop)
    back = shop.paypal.cancel_reversal(reversal)
    shop.notify(canceled(shop, capture, back))
    assert (shop.credit, shop.debt) == (3, 0)
    assert_sound(shop)


def note(shop: Shop, capture: str, status: str, txn_id: str, gross: str, fee: str = "0.00") -> bytes:
    return shop.paypal.notification(
        txn_id=txn_id, parent_txn_id=capture, payment_status=status, mc_gross=gross, mc_fee=fee,
        mc_currency="USD", business="merchant@stub.invalid", payment_date="20:12:59 Jan 13, 2026 PST",
        reason_code="chargeback", charset="utf-8",
    )  # fmt: skip


def canceled(shop: Shop, capture: str, txn_id: str, gross: str = "10.00") -> bytes:
    return note(shop, capture, "Canceled_Reversal", txn_id, gross)


def remember(monkeypatch, where: object, name: str) -> None:
    """PayPal's answer stays the same from now on, so it is asked once over the wire."""
    monkeypatch.setattr(where, name, cache(getattr(where, name)))


@pytest.mark.parametrize("left_out", ["refund", "dispute"])
def test_every_order_of_delivery_ends_in_the_same_books(shop, monkeypatch, left_out):
    """Bought 10, 3 refunded, 7 charged back, that given back, the dispute won: all orders, the first told twice."""
    top_up = shop.order()
    [capture] = PayPalOrders().capture_order(str(top_up.order_id), request_id="x").captures
    refund = shop.paypal.refund_outside(capture.external_id, "3.00")
    dispute = shop.paypal.dispute(capture.external_id, "7.00")
    reversal = shop.paypal.reverse(capture.external_id)
    back = shop.paypal.cancel_reversal(reversal)
    shop.paypal.resolve(dispute, "RESOLVED_SELLER_FAVOUR")
    rail = gateway("orders")
    remember(monkeypatch, rail, "read_return")
    remember(monkeypatch, rail, "read_order")
    for module in (events, orders):
        monkeypatch.setattr(module, "gateway", lambda name: rail)
    remember(monkeypatch, disputes, "read_dispute")
    remember(monkeypatch, inbox, "is_paypals")
    cancelled = canceled(shop, capture.external_id, back, "7.00")
    about = str(top_up.public_id)
    tell: dict[str, Callable[[int], InboundEvent]] = {
        "capture": lambda n: shop.webhook("PAYMENT.CAPTURE.COMPLETED", id="C", custom_id=about, n=n),
        "refund": lambda n: shop.webhook("PAYMENT.CAPTURE.REFUNDED", id=refund, n=n),
        "reversal": lambda n: shop.webhook("PAYMENT.CAPTURE.REVERSED", id=reversal, n=n),
        "cancelled": lambda n: shop.notify(cancelled),
        "dispute": lambda n: shop.webhook("CUSTOMER.DISPUTE.RESOLVED", dispute_id=dispute, n=n),
    }

    del tell[left_out]
    end = 10 if left_out == "refund" else 7

    def deliver(told: tuple[str, ...]) -> None:
        """Every order that begins with these, each from where its beginning left the books."""
        for name in tell.keys() - set(told) or told[:1]:  # at the end the first one once more
            with pytest.raises(Undo), transaction.atomic():
                event = tell[name](len(told))
                assert (told, event.error, event.parked_at) == (told, "", None)
                if name not in told:
                    deliver((*told, name))
                else:
                    assert (told, shop.credit, shop.available, shop.debt) == (told, end, end, 0)
                    assert (told, Settlement.objects.count()) == (told, 3 + (left_out != "refund"))
                    assert [dispute.state for dispute in Dispute.objects.all()] in ([], ["won"])
                    ends.append(told)
                raise Undo

    ends: list[tuple[str, ...]] = []
    deliver(())
    assert len(set(ends)) == 24
    for number, name in enumerate((*tell, *tell)):
        tell[name](number)
    assert shop.clearing == shop.at_paypal() + (3 if left_out == "refund" else 0)
    assert [result.name for result in verify_books() if not result.ok] == []


@pytest.mark.parametrize("first", ["webhook", "notification"])
def test_both_channels_tell_of_one_movement(shop, first):
    capture = shop.purchase()
    reversal = shop.paypal.reverse(capture, "4.00")
    tell = {
        "webhook": lambda: shop.webhook("PAYMENT.CAPTURE.REVERSED", id=reversal),
        # The other channel calls the same movement a refund.
        "notification": lambda: shop.notify(note(shop, capture, "Refunded", reversal, "-4.00")),
    }
    tell.pop(first)()
    for other in tell.values():
        assert other().error == ""
    assert (Settlement.objects.count(), shop.credit) == (2, 6)
    assert_sound(shop)


# --- disputes ------------------------------------------------------------------------------------


def test_disputed_credit_is_held_until_the_dispute_is_won(shop):
    capture = shop.purchase()
    dispute = shop.paypal.dispute(capture, "8.00")
    for number in range(2):
        shop.webhook("CUSTOMER.DISPUTE.CREATED", dispute_id=dispute, n=number)
    assert (shop.credit, shop.available) == (10, 2)
    shop.paypal.resolve(dispute)
    shop.webhook("CUSTOMER.DISPUTE.UPDATED", dispute_id=dispute)
    told = Dispute.objects.get()
    assert (told.state, told.stage, shop.available) == ("open", "CHARGEBACK", 2)
    shop.paypal.resolve(dispute, "RESOLVED_SELLER_FAVOUR")
    shop.webhook("CUSTOMER.DISPUTE.RESOLVED", dispute_id=dispute)
    assert shop.available == 10
    assert_sound(shop)


def test_a_lost_dispute_keeps_its_hold_until_the_money_is_taken_out_of_it(shop):
    capture = shop.purchase()
    shop.spend("5")
    dispute = shop.paypal.dispute(capture)
    shop.webhook("CUSTOMER.DISPUTE.CREATED", dispute_id=dispute)
    assert shop.available == 0
    shop.paypal.resolve(dispute, "RESOLVED_BUYER_FAVOUR")
    shop.webhook("CUSTOMER.DISPUTE.RESOLVED", dispute_id=dispute)
    assert (Dispute.objects.get().state, shop.credit, shop.available) == ("lost", 5, 0)
    shop.webhook("PAYMENT.CAPTURE.REVERSED", id=shop.paypal.reverse(capture))
    assert (shop.credit, shop.debt, shop.available) == (0, 5, 0)
    assert not Hold.objects.filter(state="open").exists()
    assert_sound(shop)


def test_a_dispute_about_part_of_a_purchase_leaves_the_rest_free_after_a_refund(shop):
    capture = shop.purchase()
    dispute = shop.paypal.dispute(capture, "8.00")
    shop.webhook("CUSTOMER.DISPUTE.CREATED", dispute_id=dispute)
    shop.webhook("PAYMENT.CAPTURE.REFUNDED", id=shop.paypal.refund_outside(capture, "5.00"))
    assert (shop.credit, shop.available) == (5, 2)


def test_a_dispute_that_is_told_before_its_purchase_holds_once_that_is_booked(shop):
    top_up = shop.order()
    [capture] = PayPalOrders().capture_order(str(top_up.order_id), request_id="x").captures
    dispute = shop.paypal.dispute(capture.external_id)
    shop.webhook("CUSTOMER.DISPUTE.CREATED", dispute_id=dispute)
    settle_top_up(top_up_id=top_up.pk)
    assert (shop.credit, shop.available) == (10, 0)


# --- events that wait ----------------------------------------------------------------------------


def test_an_event_waits_while_paypal_is_away_and_is_applied_by_the_sweep(shop, eager_tasks):
    refund_id = shop.paypal.refund_outside(shop.purchase(), "4.00")
    shop.paypal.break_("get_refund", "error", times=2)
    with pytest.raises(GatewayUnavailable):
        shop.webhook("PAYMENT.CAPTURE.REFUNDED", id=refund_id)
    event = InboundEvent.objects.get()
    assert (event.attempts, event.applied_at, event.parked_at) == (1, None, None)
    assert due_events(limit=10) == []
    InboundEvent.objects.update(due_at=Now() - timedelta(minutes=1))
    assert due_events(limit=10) == [event.pk]
    with pytest.raises(GatewayUnavailable):
        apply_event(event_id=event.pk)
    InboundEvent.objects.update(due_at=Now() - timedelta(minutes=1))
    tasks.sweep_events()
    event.refresh_from_db()
    assert (event.error, shop.credit) == ("", 6)
    assert event.applied_at is not None


def test_an_event_that_is_given_up_is_parked(shop, monkeypatch):
    monkeypatch.setattr(events, "MAX_ATTEMPTS", 1)
    shop.paypal.break_("get_refund", "error")
    event = shop.webhook("PAYMENT.CAPTURE.REFUNDED", id="R")
    assert event.parked_at is not None
    assert "given up" in event.error


def test_money_that_no_purchase_explains_is_parked_retried_and_dismissed(
    shop, eager_tasks, django_capture_on_commit_callbacks
):
    event = shop.webhook("PAYMENT.CAPTURE.COMPLETED", id="STRANGE", custom_id="not ours")
    assert event.parked_at is not None
    assert "STRANGE" in event.error
    with django_capture_on_commit_callbacks(execute=True):
        retry_event(event_id=event.pk, actor="user:ann")
    event.refresh_from_db()
    assert event.parked_at is not None  # still nothing that explains it
    with pytest.raises(ValueError, match="reason"):
        dismiss_event(event_id=event.pk, reason=" ", actor="user:ann")
    dismissed = dismiss_event(event_id=event.pk, reason="another shop's", actor="user:ann")
    assert dismissed.applied_at is not None
    with pytest.raises(ValueError, match="is not parked"):
        retry_event(event_id=event.pk, actor="user:ann")


def test_a_refund_that_does_not_fit_its_purchase_is_parked(shop):
    capture = shop.purchase()
    event = shop.notify(note(shop, capture, "Refunded", "R1", "-11.00"))
    assert event.parked_at is not None
    assert "more than the 10" in event.error
    assert shop.credit == 10
