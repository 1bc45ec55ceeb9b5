"""Credit by grant: what is left of each, until when, in the order of draws; in the portal and by the API."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from djmoney.money import Money

from ledger.models import Account, CreditGrant
from ledger.services import Line, grant_credit, platform_account, post_journal
from tests.apex.conftest import Team

pytestmark = pytest.mark.django_db
END = datetime(2199, 12, 31, 12, tzinfo=UTC)


def grant(team: Team, amount: str, kind: CreditGrant.Kind, expires_at: datetime | None = None) -> None:
    grant_credit(
        account=Account.objects.get(code=team.customer.wallet_code),
        kind=kind,
        amount=Money(amount, "USD"),
        key=f"{kind}:{amount}",
        actor="test",
        expires_at=expires_at,
        note="for the clerks only",
    )


def move(team: Team, amount: str) -> None:
    """> 0 is bought, < 0 is used."""
    account = Account.objects.get(code=team.customer.wallet_code)
    against = platform_account(code="bank" if Decimal(amount) > 0 else "usage_revenue", currency="USD")
    post_journal(
        scope="test",
        key=amount,
        kind="test",
        currency="USD",
        lines=[Line(account.pk, Decimal(amount)), Line(against.pk, -Decimal(amount))],
        actor="test",
    )


def test_the_balance_lists_grants_in_the_order_of_draws(acme, other):
    move(acme, "20")
    grant(acme, "3", CreditGrant.Kind.SLA)
    grant(acme, "5", CreditGrant.Kind.PROMOTIONAL, END)
    grant(other, "7", CreditGrant.Kind.PROMOTIONAL)
    move(acme, "-1.5")
    balance = acme.api().get("/v1/balance").json()
    assert balance["posted"]["amount"] == "26.500000000"
    assert balance["granted"]["amount"] == "6.500000000"
    assert balance["pending"]["amount"] == "0.000000000"
    assert [
        (row["kind"], row["amount"]["amount"], row["remaining"]["amount"], row["expires_at"])
        for row in balance["grants"]
    ] == [
        ("promotional", "5.000000000", "3.500000000", "2199-12-31T12:00:00Z"),
        ("sla", "3.000000000", "3.000000000", None),
    ]
    assert "clerks" not in str(balance)


@pytest.mark.parametrize("address", ["/portal/", "/portal/credits/", "/portal/statement/"])
def test_the_portal_says_what_is_left_and_until_when(acme, other, address):
    move(acme, "20")
    grant(acme, "5", CreditGrant.Kind.PROMOTIONAL, END)
    grant(other, "777", CreditGrant.Kind.REFUND)
    move(acme, "-1.5")
    page = acme.portal().get(address).text
    for shown in ("Promotional", "3.50 USD", "of 5.00 USD"):
        assert shown in page
    assert "31 Dec 2199, 12:00" in page
    assert "20.00 USD" in page  # bought, not touched yet
    assert "777" not in page
    assert "clerks" not in page


def test_without_grants_the_portal_says_so(acme):
    portal = acme.portal()
    assert "You have no credit." in portal.get("/portal/credits/").text
    move(acme, "20")
    assert "All of it was bought and does not expire." in portal.get("/portal/credits/").text
