"""The checks between usage and the books find what they are for."""

from decimal import Decimal

import pytest

from brokerage.models import UsageEvent
from brokerage.services.charging import charge_usage
from ledger.services import Line, platform_account, post_journal
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
    assert broken() == ["usage_matches_journals"]


def test_a_mark_without_its_journal_is_found(usage):
    UsageEvent.objects.update(journal_id=usage.journal_id + 1)
    assert "usage_matches_journals" in broken()


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
    assert {"usage_amounts_are_rated", "usage_is_charged_once"} <= set(broken())


def test_a_charge_for_nothing_delivered_is_found(usage):
    UsageEvent.objects.update(completion_tokens=0)
    assert broken() == ["usage_amounts_are_rated"]
