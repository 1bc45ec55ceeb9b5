"""Our settlements against PayPal's own list, in both directions, and payouts on the bank's proof."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.db import transaction
from django.utils import timezone
from djmoney.money import Money

from ledger import payouts, tasks
from ledger.errors import BadPosting, IdempotencyConflict
from ledger.models import AuditEvent, Difference, Reconciliation, Settlement, TopUp
from ledger.paypal import reconciliation, reports, selectors
from ledger.paypal.client import PayPalOrders
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable
from ledger.paypal.orders import settle_top_up
from ledger.paypal.reconciliation import reconcile_day, resolve_difference
from ledger.paypal.reports import read_balances, read_movements
from ledger.paypal.returns import book_return
from ledger.selectors import account_balance, wallet
from ledger.services import Line, platform_account, post_journal
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet
from tests.ledger.test_paypal import buy

pytestmark = pytest.mark.django_db
YESTERDAY = (timezone.now() - timedelta(days=1)).date()


class Shop:
    """Everything at the loopback PayPal happens yesterday at noon."""

    def __init__(self, paypal, monkeypatch) -> None:
        self.paypal = paypal
        self.team = make_wallet()
        noon = f"{YESTERDAY}T12:00:00Z"
        monkeypatch.setattr("ledger.paypal.stub.store.utc_now", lambda: noon)

    def pay(self, currency: str = "USD") -> TopUp:
        """Paid at PayPal; nobody has told us."""
        assert self.team.currency == currency
        top_up = buy(self.team, "10.00")
        self.paypal.approve(top_up.order_id)
        PayPalOrders().capture_order(str(top_up.order_id), request_id=str(top_up.capture_request_id))
        return top_up

    def purchase(self) -> str:
        top_up = self.pay()
        settle_top_up(top_up_id=top_up.pk)
        return Settlement.objects.get(kind="capture", top_up=top_up).external_id

    def line(self, transaction_id: str) -> dict[str, str]:
        [line] = [one for one in self.paypal.store.movements if one["transaction_id"] == transaction_id]
        return line

    @property
    def credit(self) -> Decimal:
        return wallet(self.team.code).posted


@pytest.fixture
def shop(paypal, monkeypatch) -> Shop:
    return Shop(paypal, monkeypatch)


def reconcile() -> tuple[int, list[tuple[str, str]]]:
    """How many movements were booked by it, and what is open: kind and id."""
    run = reconcile_day(day=YESTERDAY)
    still_open = Difference.objects.filter(resolved_at=None).order_by("kind", "external_id")
    assert run.differences == still_open.count()
    return run.healed, [(row.kind, row.external_id) for row in still_open]


def broken() -> list[str]:
    return [result.name for result in verify_books() if not result.ok]


def test_a_day_on_which_both_sides_agree(shop):
    shop.purchase()
    shop.purchase()
    assert reconcile() == (0, [])
    run = Reconciliation.objects.get()
    assert (run.day, run.theirs, run.ours) == (YESTERDAY, 2, 2)


def test_what_no_event_told_is_booked_from_the_list(shop):
    """A payment, a refund and a chargeback whose webhooks were all lost, and the money that goes to the bank."""
    shop.pay()
    capture = shop.purchase()
    refund = shop.paypal.refund_outside(capture, "4.00")
    reversal = shop.paypal.reverse(capture, "6.00")
    back = shop.paypal.cancel_reversal(reversal)
    shop.paypal.move("T0106", "-20.00")
    shop.paypal.move("T0400", "-1.00")
    held = shop.paypal.move("T1110", "-2.00", reference_id=capture)
    shop.paypal.move("T1111", "2.00", reference_id=held)
    assert reconcile() == (8, [])
    kinds = set(Settlement.objects.values_list("kind", "external_id"))
    assert {("refund", refund), ("reversal", reversal), ("reversal_cancelled", back)} <= kinds
    assert shop.credit == 16
    assert account_balance(platform_account(code="bank", currency="USD")) == -1
    assert account_balance(platform_account(code="dispute_fees", currency="USD")) == -20
    assert account_balance(platform_account(code="paypal_dispute_held", currency="USD")) == 0
    assert broken() == []
    assert reconcile() == (0, [])


def test_what_nothing_explains_is_a_difference(shop):
    strange = shop.paypal.move("T0000", "7.00")
    assert reconcile() == (0, [("balance_differs", "USD"), ("missing_here", strange)])
    row = Difference.objects.get(kind="missing_here")
    assert (row.their_gross, row.our_gross, row.code, row.currency) == (7, None, "T0000", "USD")


def test_a_refund_that_does_not_fit_says_why(shop):
    capture = shop.purchase()
    refund = shop.paypal.refund_outside(capture, "4.00")
    shop.line(refund)["gross"] = "-11.00"
    reconcile()
    assert "more than the 10" in Difference.objects.get(kind="missing_here").detail


def test_what_paypal_does_not_list_is_a_difference(shop):
    capture = shop.purchase()
    shop.paypal.store.movements.clear()
    assert reconcile() == (0, [("balance_differs", "USD"), ("missing_there", capture)])
    row = Difference.objects.get(kind="missing_there")
    assert (row.our_gross, row.our_fee, row.their_gross) == (10, Decimal("-0.84"), None)


@pytest.mark.parametrize(("field", "value"), [("gross", "9.99"), ("fee", "-0.85")])
def test_other_figures_are_a_difference(shop, field, value):
    capture = shop.purchase()
    shop.line(capture)[field] = value
    assert ("figures_differ", capture) in reconcile()[1]
    row = Difference.objects.get(kind="figures_differ")
    assert str(getattr(row, f"their_{field}").normalize()) == value
    assert (row.our_gross, row.our_fee) == (10, Decimal("-0.84"))


def test_another_currency_is_a_difference(shop):
    capture = shop.purchase()
    shop.line(capture)["currency"] = "EUR"
    reconcile()
    assert Difference.objects.get(external_id=capture).detail == "PayPal has it in EUR, we have it in USD"


def test_a_movement_just_over_midnight_is_no_difference(shop):
    """Our time of it and PayPal's may fall on two days."""
    capture = shop.purchase()
    shop.line(capture)["at"] = f"{YESTERDAY + timedelta(days=1)}T00:00:30Z"
    assert ("missing_there", capture) not in reconcile()[1]


def test_a_difference_that_is_gone_closes_itself_and_a_resolved_one_stays_closed(shop):
    capture = shop.purchase()
    strange = shop.paypal.move("T0000", "7.00")
    shop.line(capture)["fee"] = "-0.85"
    assert len(reconcile()[1]) == 3
    shop.line(capture)["fee"] = "-0.84"
    assert reconcile()[1] == [("balance_differs", "USD"), ("missing_here", strange)]
    closed = Difference.objects.get(kind="figures_differ")
    assert closed.resolved_by == "system:reconciliation"
    for row in Difference.objects.filter(resolved_at=None):
        resolve_difference(difference_id=row.pk, resolution="a gift of the owner", actor="user:ann")
    assert reconcile()[1] == []
    assert AuditEvent.objects.filter(action="reconciliation.resolved").count() == 2
    with pytest.raises(ValueError, match="is not open"):
        resolve_difference(difference_id=closed.pk, resolution="again", actor="user:ann")
    with pytest.raises(ValueError, match="saying what it was"):
        resolve_difference(difference_id=closed.pk, resolution=" ", actor="user:ann")


def test_the_list_is_read_page_by_page(shop, monkeypatch):
    monkeypatch.setattr(reports, "_PAGE", 2)
    ids = [shop.paypal.move("T0400", f"-{number}.00") for number in range(1, 6)]
    start = datetime.combine(YESTERDAY, datetime.min.time(), UTC)
    listed = list(read_movements(start=start, end=start + timedelta(days=1)))
    assert [movement.external_id for movement in listed] == ids
    assert [movement.gross for movement in listed] == [-1, -2, -3, -4, -5]


def test_a_range_that_paypal_does_not_take_is_refused_in_its_words(shop):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with pytest.raises(GatewayRefused):
        list(read_movements(start=start, end=start + timedelta(days=40)))


def test_balances_are_by_currency(shop):
    shop.paypal.move("T0000", "7.00")
    shop.paypal.move("T0000", "500", "JPY")
    assert read_balances(at=timezone.now()) == {"USD": 7, "JPY": 500}


def test_a_day_that_is_not_over_cannot_be_compared(shop):
    with pytest.raises(ValueError, match="is not over yet"):
        reconcile_day(day=timezone.now().date())


@pytest.mark.parametrize("operation", ["search", "balances"])
def test_while_paypal_is_away_no_day_counts_as_compared(shop, operation):
    shop.paypal.break_(operation, "error")
    with pytest.raises(GatewayUnavailable):
        reconcile_day(day=YESTERDAY)
    assert not Reconciliation.objects.exists()


def test_every_morning_the_last_two_days_are_compared(shop):
    shop.purchase()
    assert tasks.reconcile_paypal() == 0
    days = list(Reconciliation.objects.order_by("pk").values_list("day", flat=True))
    assert days == [YESTERDAY - timedelta(days=1), YESTERDAY]


def test_a_lost_notification_of_a_payment_button_is_made_good(shop, settings):
    settings.PAYPAL_RAIL = "ipn"
    top_up = buy(shop.team, "10.00")
    shop.paypal.store.move(
        "TXN1", "T0007", "USD", Decimal(10), Decimal("-0.84"), invoice_id=str(top_up.public_id)
    )
    assert reconcile() == (1, [])
    assert shop.credit == 10


def test_the_state_for_health_and_back_office(shop, django_assert_num_queries):
    shop.purchase()
    Settlement.objects.get()  # of yesterday
    with django_assert_num_queries(6 + 1):
        before = selectors.paypal_state()
    assert before.open_differences == 0
    shop.paypal.move("T0000", "7.00")
    reconcile()
    after = selectors.paypal_state()
    assert (after.open_differences, after.reconciled_through, after.reconciliation_due) == (
        2,
        YESTERDAY,
        False,
    )
    assert selectors.open_differences().count() == 2


def test_a_payment_that_paypal_changes_into_our_currency(shop, paypal, monkeypatch):
    """Bought in EUR, kept in USD: both clearing accounts are what PayPal has, after refund and failed refund too."""
    paypal.store.home = ("USD", Decimal("1.10"))
    shop.team = make_wallet(currency="EUR")
    top_up = shop.pay("EUR")
    settle_top_up(top_up_id=top_up.pk)
    settle_top_up(top_up_id=top_up.pk)
    capture = Settlement.objects.get(kind="capture").external_id

    def clearing() -> dict[str, Decimal]:
        return {
            currency: -account_balance(platform_account(code="paypal_clearing", currency=currency))
            for currency in ("EUR", "USD")
        }

    # 10.00 EUR less 0.84 EUR, at 1.10.
    assert (shop.credit, clearing()) == (10, {"EUR": 0, "USD": Decimal("10.08")})
    assert reconcile() == (0, [])
    refund = PayPalOrders().read_return(paypal.refund_outside(capture, "4.00"))
    for _ in range(2):
        book_return(provider="paypal", told=refund)
    assert (shop.credit, clearing()) == (6, {"EUR": 0, "USD": Decimal("5.68")})
    assert reconcile() == (0, [])
    paypal.complete_refund(refund.external_id, failed=True)
    for _ in range(2):
        book_return(provider="paypal", told=PayPalOrders().read_return(refund.external_id))
    assert (shop.credit, clearing()) == (10, {"EUR": 0, "USD": Decimal("10.08")})
    assert reconcile() == (0, [])
    assert broken() == []


# --- payouts -------------------------------------------------------------------------------------


@pytest.fixture
def owed() -> None:
    """We owe providers 100 USD."""
    cost, payable = (
        platform_account(code=code, currency="USD") for code in ("provider_cost", "provider_payable")
    )
    post_journal(
        scope="test", key="cost", kind="cost", currency="USD", actor="test",
        lines=[Line(cost.pk, Decimal(-100)), Line(payable.pk, Decimal(100))],
    )  # fmt: skip


def start(amount: str = "60", key: str = "k") -> payouts.Payout:
    return payouts.start_payout(
        payee="RunPod", amount=Money(amount, "USD"), actor="user:ann", idempotency_key=key
    )


def balances() -> tuple[Decimal, Decimal]:
    """What the bank has, what we owe."""
    return tuple(
        sign * account_balance(platform_account(code=code, currency="USD"))
        for sign, code in ((-1, "bank"), (1, "provider_payable"))
    )  # type: ignore[return-value]


def test_a_payout_is_booked_when_the_bank_shows_it(owed):
    payout = start()
    assert (payout.state, balances()) == ("intended", (0, 100))
    assert payouts.mark_payout_sent(payout_id=payout.pk, actor="user:ann").state == "sent"
    assert balances() == (0, 100)
    for _ in range(2):
        paid = payouts.confirm_payout(
            payout_id=payout.pk, bank_reference="E2E-1", paid_at=timezone.now(), actor="user:bob"
        )
        assert (paid.state, balances()) == ("paid", (-60, 40))
    settlement = Settlement.objects.get()
    assert (settlement.provider, settlement.kind, settlement.external_id) == ("bank", "payout", "E2E-1")
    assert broken() == []
    assert AuditEvent.objects.filter(object_type="payout").count() == 3


def test_one_reference_of_the_bank_pays_once(owed):
    first, second = start("10", "a"), start("10", "b")
    payouts.confirm_payout(payout_id=first.pk, bank_reference="E", paid_at=timezone.now(), actor="a")
    with pytest.raises(IdempotencyConflict):
        payouts.confirm_payout(payout_id=second.pk, bank_reference="E", paid_at=timezone.now(), actor="a")
    with pytest.raises(ValueError, match="is paid"), transaction.atomic():
        payouts.confirm_payout(payout_id=first.pk, bank_reference="F", paid_at=timezone.now(), actor="a")
    with pytest.raises(ValueError, match="is the proof"):
        payouts.confirm_payout(payout_id=second.pk, bank_reference=" ", paid_at=timezone.now(), actor="a")
    assert balances() == (-10, 90)


def test_no_more_is_paid_than_is_owed_open_payouts_included(owed):
    start("60", "a")
    with pytest.raises(BadPosting, match="at most the 40 USD owed"):
        start("41", "b")
    with pytest.raises(BadPosting):
        start("0", "b")
    assert start("60", "a").idempotency_key == "a"
    with pytest.raises(IdempotencyConflict):
        start("61", "a")


def test_a_cancelled_payout_stays_owed(owed):
    payout = start("100")
    with pytest.raises(ValueError, match="reason"):
        payouts.cancel_payout(payout_id=payout.pk, reason="", actor="a")
    payouts.cancel_payout(payout_id=payout.pk, reason="wrong account", actor="a")
    assert payouts.payable("USD") == 100
    with pytest.raises(ValueError, match="cancelled, it cannot become sent"):
        payouts.mark_payout_sent(payout_id=payout.pk, actor="a")
    with pytest.raises(ValueError, match="cannot become paid"), transaction.atomic():
        payouts.confirm_payout(payout_id=payout.pk, bank_reference="E", paid_at=timezone.now(), actor="a")


def test_capture_and_transfer_are_one_settlement_each(shop):
    """The same movement from the list again is a replay; with other figures it is refused."""
    moved = shop.paypal.move("T0400", "-1.00")
    reconcile()
    facts = reconciliation.Movement(
        external_id=moved, code="T0400", currency="USD", gross=Decimal(-2), fee=Decimal(0), reference_id="",
        invoice_id="", occurred_at=timezone.now(),
    )  # fmt: skip
    with pytest.raises(IdempotencyConflict) as caught:
        reconciliation._transfer(facts, *reconciliation._WITHDRAWAL)
    assert caught.value.fields == ["gross"]
