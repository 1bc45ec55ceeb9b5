"""What an approved proposal does to the money, kind by kind, and what happens when it cannot be done."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from djmoney.money import Money

from ledger import tasks
from ledger.errors import BadPosting, InsufficientFunds
from ledger.models import Account, CreditGrant, PeriodClose, Proposal, Refund
from ledger.paypal.refunds import drive_refund
from ledger.proposals.services import approve, propose
from ledger.reports import debt_of
from ledger.selectors import wallet
from ledger.services import JournalRequest, create_hold, platform_account, post_journals
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet, spend
from tests.ledger.test_paypal_returns import Shop
from tests.ledger.test_proposals import WHY, agreed

Kind = Proposal.Kind


def proposed(
    kind: Proposal.Kind, team: Account | None = None, amount: str | None = None, **payload: object
) -> Proposal:
    money = Money(amount, "USD") if amount else None
    return propose(
        kind=kind, summary="s", payload=payload, account=team, amount=money, reason=WHY, actor="user:ann"
    )  # fmt: skip


def owing(amount: str) -> Account:
    """A wallet whose owner got more than the credit paid for."""
    team = make_wallet("1")
    revenue = platform_account(code="usage_revenue", currency="USD")
    hold = create_hold(
        account=team, amount=Money(1, "USD"), key=team.code, ttl=timedelta(hours=1), actor="test"
    )
    lines = spend(team, revenue, str(Decimal(amount) + 1))
    post_journals([JournalRequest("d", team.code, "usage", "USD", lines, "test", capture_hold=hold.hold_id)])
    return team


@pytest.mark.django_db
def test_a_grant_has_its_terms():
    team = make_wallet("2")
    ends = datetime.now(UTC) + timedelta(days=7)
    done = agreed(proposed(Kind.GRANT, team, "5", grant="promotional", expires_at=ends.isoformat()))
    grant = CreditGrant.objects.get()
    assert (grant.kind, grant.remaining, grant.expires_at, grant.journal) == (
        "promotional",
        5,
        ends,
        done.journal,
    )
    assert wallet(team.code).posted == 7
    assert all(check.ok for check in verify_books())


@pytest.mark.django_db
def test_a_debt_is_written_off_and_never_more_of_it():
    team = owing("3")
    assert debt_of(team) == 3
    agreed(proposed(Kind.WRITE_OFF, team, "2"))
    assert debt_of(team) == 1
    with pytest.raises(BadPosting):
        agreed(proposed(Kind.WRITE_OFF, team, "1.5"))
    assert debt_of(team) == 1
    assert all(check.ok for check in verify_books())


@pytest.mark.django_db
def test_a_closed_period_is_opened_again_by_two():
    agreed(proposed(Kind.CLOSE_PERIOD, through="2020-12-31"))
    agreed(proposed(Kind.REOPEN_PERIOD, through="2020-06-30"))
    assert PeriodClose.objects.order_by("-id").first().closed_through == date(2020, 6, 30)


def refund_of(capture: str, team: Account, amount: str, *, allow_debt: bool = False) -> Proposal:
    return proposed(Kind.REFUND, team, amount, capture=capture, allow_debt=allow_debt)


def test_a_refund_is_written_down_with_the_approval_and_booked_on_paypals_proof(
    fresh_database, paypal, monkeypatch
):
    shop, sent = Shop(paypal), []
    monkeypatch.setattr(tasks.drive_refund, "delay", sent.append)
    capture = shop.purchase()
    proposal = agreed(refund_of(capture, shop.team, "4.00"))
    refund = Refund.objects.get()
    assert (refund.state, refund.idempotency_key) == ("started", f"proposal:{proposal.public_id}")
    assert sent == [refund.pk]
    assert (shop.credit, shop.available) == (10, 6)  # held, not yet gone
    drive_refund(refund_id=refund.pk)
    refund.refresh_from_db()
    assert refund.state == "completed"
    assert shop.credit == 6
    assert all(check.ok for check in verify_books())


def test_a_refund_whose_hint_is_lost_is_sent_by_the_sweep(fresh_database, paypal, monkeypatch, eager_tasks):
    shop = Shop(paypal)

    def lost(*_: object) -> None:
        raise ConnectionError("no broker")

    capture = shop.purchase()
    with monkeypatch.context() as broken:
        broken.setattr(tasks.drive_refund, "delay", lost)
        assert agreed(refund_of(capture, shop.team, "4.00")).state == "approved"
    Refund.objects.update(changed_at=datetime.now(UTC) - timedelta(hours=1))
    tasks.sweep_refunds()
    assert Refund.objects.get().state == "completed"
    assert shop.credit == 6


def test_what_was_spent_is_refunded_only_when_it_may_become_a_debt(fresh_database, paypal, eager_tasks):
    shop = Shop(paypal)
    capture = shop.purchase()
    shop.spend("8")
    refused = refund_of(capture, shop.team, "5.00")
    with pytest.raises(InsufficientFunds):
        agreed(refused)
    refused.refresh_from_db()
    assert refused.state == "open"
    assert not Refund.objects.exists()
    agreed(refund_of(capture, shop.team, "5.00", allow_debt=True))
    assert (Refund.objects.get().state, shop.credit, debt_of(shop.team)) == ("completed", 0, 3)


def test_two_refunds_never_exceed_their_purchase(fresh_database, paypal, eager_tasks):
    shop = Shop(paypal)
    capture = shop.purchase()
    agreed(refund_of(capture, shop.team, "7.00"))
    with pytest.raises(BadPosting, match="still be refunded"):
        approve(proposal=refund_of(capture, shop.team, "3.01"), actor="user:bob", may_exceed_limit=False)
    assert shop.credit == 3
