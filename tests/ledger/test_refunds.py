"""Money sent back: partly, twice, too much, too early, after it was spent, and all of that at once."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from itertools import permutations

import pytest
from django.db import connection
from djmoney.money import Money

from ledger.errors import BadPosting, IdempotencyConflict
from ledger.models import Account, Journal, ParkedRefund, Settlement
from ledger.selectors import account_balance, wallet
from ledger.services import SettledRefund, platform_account, post_journal, settle_refund
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet, spend
from tests.ledger.test_concurrency import at_once


class Till:
    """One wallet, and the accounts of the platform that a purchase touches."""

    def __init__(self) -> None:
        self.team = make_wallet()
        self.clearing, self.fees, self.revenue = (
            platform_account(code=code, currency="USD")
            for code in ("paypal_clearing", "processor_fees", "usage_revenue")
        )

    def capture(self, external_id: str = "C", gross: str = "10", fee: str = "1") -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT settle_apply('paypal', 'capture', %s, 'O', NULL, %s, %s, %s, 'USD', %s, %s, 'test', NULL)",
                [external_id, self.team.pk, self.clearing.pk, self.fees.pk, Decimal(gross), Decimal(fee)],
            )

    def refund(
        self, amount: str, external_id: str = "R", capture: str = "C", fee: str = "0", currency: str = "USD"
    ) -> SettledRefund:
        return settle_refund(
            provider="paypal",
            external_id=external_id,
            capture_id=capture,
            amount=Money(amount, currency),
            fee=Decimal(fee),
            actor="test",
        )

    def spend(self, amount: str) -> None:
        post_journal(
            scope="test", key=amount, kind="usage", currency="USD",
            lines=spend(self.team, self.revenue, amount), actor="test",
        )  # fmt: skip

    @property
    def credit(self) -> Decimal:
        return wallet(self.team.code).posted

    @property
    def debt(self) -> Decimal:
        receivable = Account.objects.filter(code=f"customer_receivable:{self.team.pk}").first()
        return -account_balance(receivable) if receivable else Decimal(0)

    @property
    def platform(self) -> tuple[Decimal, Decimal]:
        """What PayPal has of ours, and what it took in fees."""
        return -account_balance(self.clearing), -account_balance(self.fees)


def broken() -> list[str]:
    return [result.name for result in verify_books() if not result.ok]


@pytest.fixture
def till(db) -> Iterator[Till]:
    till = Till()
    yield till
    with connection.cursor() as cursor:  # every deferred guard too
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")


def test_it_takes_the_credit_back(till):
    till.capture()
    done = till.refund("10")
    assert (done.replayed, done.parked) == (False, False)
    # The fee is lost: nine were received, ten went back.
    assert (till.credit, till.debt, till.platform) == (0, 0, (-1, 1))
    settlement = Settlement.objects.get(kind="refund")
    assert (settlement.pk, settlement.journal_id) == (done.settlement_id, done.journal_id)
    assert (settlement.parent_external_id, settlement.order_id, settlement.account_id) == (
        "C",
        "O",
        till.team.pk,
    )
    assert broken() == []


def test_partial_refunds_add_up_to_the_capture_and_no_further(till):
    till.capture()
    till.refund("4", "R1", fee="0.4")
    till.refund("6", "R2", fee="0.6")
    assert (till.credit, till.platform) == (0, (0, 0))
    with pytest.raises(BadPosting, match=r"more than the 0\.0+ and 0\.0+ that are left"):
        till.refund("0.01", "R3")
    assert broken() == []


def test_more_of_the_fee_than_was_taken_does_not_come_back(till):
    till.capture()
    with pytest.raises(BadPosting, match="are left of it"):
        till.refund("5", fee="1.01")
    assert Settlement.objects.filter(kind="refund").count() == 0


def test_the_same_refund_again_is_a_replay_even_when_the_wallet_has_changed(till):
    till.capture()
    first = till.refund("4")
    till.spend("5")
    again = till.refund("4")
    assert again == SettledRefund(first.settlement_id, first.journal_id, replayed=True, parked=False)
    assert till.credit == 1


@pytest.mark.parametrize(
    ("other", "field"),
    [({"amount": "5"}, "gross"), ({"amount": "4", "fee": "0.5"}, "fee"), ({"amount": "4", "currency": "EUR"}, "currency"),
     ({"amount": "4", "capture": "D"}, "capture")],
)  # fmt: skip
@pytest.mark.parametrize("booked", [True, False])
def test_another_refund_under_the_same_id_is_a_conflict(till, other, field, booked):
    if booked:
        till.capture("C")
        till.capture("D")
    till.refund("4")
    with pytest.raises(IdempotencyConflict) as caught:
        till.refund(**other)
    assert caught.value.fields == [field]


def test_what_was_spent_already_is_a_debt_and_the_next_purchase_pays_it(till):
    till.capture()
    till.spend("7")
    till.refund("10")
    assert (till.credit, till.debt) == (0, 7)
    assert broken() == []
    till.capture("C2")
    assert (till.credit, till.debt) == (3, 0)
    assert broken() == []


def test_a_refund_that_is_told_before_its_capture_waits_for_it(till):
    early = till.refund("4", fee="0.5")
    assert early == SettledRefund(None, None, replayed=False, parked=True)
    assert till.refund("4", fee="0.5") == SettledRefund(None, None, replayed=True, parked=True)
    assert till.credit == 0
    assert broken() == []
    till.capture()
    assert (till.credit, till.platform) == (6, (Decimal("5.5"), Decimal("0.5")))
    assert ParkedRefund.objects.get().applied_at is not None
    late = till.refund("4", fee="0.5")
    assert (late.replayed, late.parked, late.settlement_id) == (
        True,
        False,
        Settlement.objects.get(kind="refund").pk,
    )
    assert broken() == []


@pytest.mark.parametrize(("amount", "currency"), [("11", "USD"), ("4", "EUR")])
def test_a_parked_refund_that_does_not_fit_does_not_stop_the_capture(till, amount, currency):
    till.refund(amount, currency=currency)
    till.capture()
    assert till.credit == 10
    parked = ParkedRefund.objects.get()
    assert parked.applied_at is None
    assert "refund R of capture C" in parked.error
    assert broken() == ["refunds_do_not_stay_parked"]


@pytest.mark.parametrize("order", sorted(set(permutations(["capture", "R1", "R2", "capture", "R1"]))))
def test_every_order_of_delivery_ends_in_the_same_books(till, order):
    for event in order:
        if event == "capture":
            till.capture()
        else:
            till.refund({"R1": "3", "R2": "2"}[event], event)
    assert (till.credit, till.debt, till.platform) == (5, 0, (4, 1))
    assert Journal.objects.filter(kind__in=["top_up", "refund"]).count() == 3
    assert broken() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amount": "0"}, "gross must be above the fee"),
        ({"amount": "-1"}, "gross must be above the fee"),
        ({"amount": "1", "fee": "1"}, "gross must be above the fee"),
        ({"amount": "1", "fee": "-0.1"}, "gross must be above the fee"),
        ({"amount": "0.0000000001"}, "gross must be above the fee"),
        ({"amount": "1", "external_id": ""}, "the ids of refund and capture"),
        ({"amount": "1", "capture": ""}, "the ids of refund and capture"),
        ({"amount": "1", "currency": "EUR"}, "the capture is in USD"),
    ],
)
def test_malformed_refunds_are_refused(till, arguments, message):
    till.capture()
    with pytest.raises(BadPosting, match=message):
        till.refund(**arguments)
    assert ParkedRefund.objects.count() == 0


def test_captures_and_their_refunds_at_the_same_time(fresh_database):
    """Whoever is first, each refund is booked once: none stays parked behind its capture."""
    till = Till()

    def work(number: int) -> None:
        capture, event = f"C{number % 10}", number // 10 % 4
        if event % 2:
            till.capture(capture)
        else:
            till.refund("3", f"R{number % 10} {event}", capture)

    at_once(work, 80)
    assert (till.credit, till.debt) == (10 * (10 - 2 * 3), 0)
    assert Settlement.objects.filter(kind="refund").count() == 20
    assert broken() == []
