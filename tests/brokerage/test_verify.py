"""The checks between usage and the books find what they are for."""

from decimal import Decimal
from uuid import uuid4

import pytest
from django.utils import timezone

from brokerage.models import UsageEvent
from brokerage.services.charging import charge_usage
from ledger.models import Account
from ledger.services import DeliveredLine, Line, charge_lines, platform_account, post_journal
from ledger.verify import verify_books
from tests.brokerage.factories import make_customer, make_model, make_price, make_usage

pytestmark = pytest.mark.django_db


@pytest.fixture
def usage():
    """One answer, charged."""
    customer = make_customer(credit="1")
    make_usage(
        customer, make_price(make_model(), prompt="0.0000000005", completion="0.0002"), prompt_tokens=1
    )
    charge_usage(limit=10)
    return UsageEvent.objects.get()


def broken() -> list[str]:
    return [result.name for result in verify_books() if not result.ok]


def test_books_in_order(usage):
    assert usage.amount == Decimal("0.01")  # the half of the last place went to the even neighbour
    assert broken() == []


def test_uncharged_usage_breaks_nothing():
    make_usage(make_customer(), make_price(make_model()))
    assert broken() == []


def test_a_charge_that_lost_its_mark_is_found(usage):
    UsageEvent.objects.update(charged_at=None, amount=None, journal_id=None)
    assert broken() == ["usage_matches_lines"]


def test_a_mark_with_another_journal_is_found(usage):
    UsageEvent.objects.update(journal_id=usage.journal_id + 1)
    assert broken() == ["usage_matches_lines"]


def test_a_line_without_its_answer_is_found(usage):
    charge_lines(
        [
            DeliveredLine(
                event_id=f"answer:{uuid4()}",
                account_id=Account.objects.get(code=usage.customer.wallet_code).pk,
                sku="tokens",
                quantity=Decimal(1),
                amount=Decimal("0.5"),
                currency="USD",
                occurred_at=usage.finished_at,
            )
        ],
        actor="test",
    )
    assert broken() == ["usage_matches_lines"]


class TestAnswersWithAJournalEach:
    """As they were charged before wallets' answers shared one."""

    @pytest.fixture(autouse=True)
    def old(self, usage):
        other = make_usage(usage.customer, usage.price, prompt_tokens=0, completion_tokens=100)
        wallet_id = Account.objects.get(code=usage.customer.wallet_code).pk
        revenue = platform_account(code="usage_revenue", currency="USD").pk
        lines = [Line(wallet_id, Decimal("-0.02")), Line(revenue, Decimal("0.02"))]
        journal = post_journal(
            scope="usage", key=str(other.pk), kind="usage", currency="USD", lines=lines, actor="test"
        )
        other.amount, other.journal_id, other.charged_at = Decimal("0.02"), journal.journal_id, timezone.now()
        other.save()
        self.other = UsageEvent.objects.filter(pk=other.pk)

    def test_they_are_in_order(self):
        assert broken() == []

    @pytest.mark.parametrize(
        "change", [{"amount": Decimal("0.03")}, {"amount": None, "charged_at": None, "journal_id": None}]
    )
    def test_what_differs_is_found(self, change):
        self.other.update(**change)
        assert "usage_matches_journals" in broken()

    def test_a_second_answer_of_the_same_journal_is_found(self, usage):
        UsageEvent.objects.filter(pk=usage.pk).update(journal_id=self.other.get().journal_id)
        assert {"usage_matches_journals", "usage_matches_lines"} <= set(broken())


def test_money_taken_without_usage_is_found():
    sides = [platform_account(code=code, currency="USD").pk for code in ("bank", "usage_revenue")]
    post_journal(
        scope="usage",
        key="nobody asked",
        kind="usage",
        currency="USD",
        lines=[Line(sides[0], Decimal(-1)), Line(sides[1], Decimal(1))],
        actor="test",
    )
    assert broken() == ["usage_matches_journals"]


@pytest.mark.parametrize("amount", ["0.010000001", "0.009999999", "0.02"])
def test_a_wrong_amount_is_found(usage, amount):
    UsageEvent.objects.update(amount=Decimal(amount))
    assert {"usage_amounts_are_rated", "usage_matches_lines"} <= set(broken())


def test_a_charge_for_nothing_delivered_is_found(usage):
    UsageEvent.objects.update(completion_tokens=0)
    assert broken() == ["usage_amounts_are_rated"]
