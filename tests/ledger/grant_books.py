"""Books in which credit grants, an exchange and totals occur."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from djmoney.money import Money

from ledger.models import Account, CreditGrant
from ledger.services import (
    MeteredLine,
    advance_totals,
    exchange,
    grant_credit,
    load_usage,
    post_journal,
    post_usage,
    recognise_promotions,
    reverse_journal,
)
from tests.ledger.conftest import make_wallet, spend


def use_grants(revenue: Account) -> None:
    """A promotion that was drawn on, given back to and recognised; an exchange; and totals of it all."""
    team, euros = make_wallet("3"), make_wallet(currency="EUR")
    grant_credit(
        account=team,
        kind=CreditGrant.Kind.PROMOTIONAL,
        amount=Money(5, "USD"),
        key="welcome",
        actor="test",
        expires_at=datetime.now(UTC) + timedelta(days=1),
    )
    for key in ("kept", "undone"):
        posted = post_journal(
            scope="grants",
            key=key,
            kind="usage",
            currency="USD",
            lines=spend(team, revenue, "1"),
            actor="test",
        )
    reverse_journal(journal_id=posted.journal_id, reason="test", actor="test")
    recognise_promotions(limit=10)
    exchange(
        key="x", source=team, sold=Money(1, "USD"), target=euros, bought=Money("0.9", "EUR"), actor="test"
    )
    load_usage(
        [
            MeteredLine("line", team.pk, "tokens", Decimal(3), "USD", datetime.now(UTC), rate=Decimal("0.1")),
            MeteredLine(
                "flat", team.pk, "support", Decimal(1), "USD", datetime.now(UTC), amount=Decimal("0.1")
            ),
        ]
    )
    post_usage(limit=10)
    less = MeteredLine(
        "less", team.pk, "tokens", Decimal(2), "USD", datetime.now(UTC), rate=Decimal("0.1"), corrects="line"
    )
    load_usage([less])
    post_usage(limit=10)
    advance_totals()
