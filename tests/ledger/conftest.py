"""Wallets and accounts for the ledger's tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import connection
from djmoney.money import Money

from apex.celery import app
from ledger.models import Account, TopUp
from ledger.paypal.certificates import fetches, forget_certificates
from ledger.paypal.signature import questions
from ledger.paypal.store import audited
from ledger.paypal.stub.signing import signer
from ledger.services import (
    JournalRequest,
    Line,
    create_hold,
    open_wallet,
    platform_account,
    post_journal,
    post_journals,
    reverse_journal,
    settle_refund,
)
from tests.ledger.paypal_stub import RunningStub, running_stub


def make_wallet(credit: str = "0", currency: str = "USD") -> Account:
    """A wallet with that much credit, bought out of the bank account."""
    account = open_wallet(code=f"customer_credit:{uuid.uuid4()}", owner="team", currency=currency)
    if Decimal(credit):
        bank = platform_account(code="bank", currency=currency)
        post_journal(
            scope="test.credit",
            key=account.code,
            kind="credit",
            currency=currency,
            lines=[Line(bank.pk, -Decimal(credit)), Line(account.pk, Decimal(credit))],
            actor="test",
        )
    return account


@pytest.fixture
def revenue(db) -> Account:
    return platform_account(code="usage_revenue", currency="USD")


def spend(wallet: Account, revenue: Account, amount: str) -> list[Line]:
    return [Line(wallet.pk, -Decimal(amount)), Line(revenue.pk, Decimal(amount))]


@pytest.fixture
def books(fresh_database) -> dict[str, int]:
    """Books in which everything happened once: a purchase, a refund, a charge, a reversal, a debt, an open hold."""
    team = make_wallet("10")
    revenue, clearing, fees = (
        platform_account(code=code, currency="USD")
        for code in ("usage_revenue", "paypal_clearing", "processor_fees")
    )
    holds = [
        create_hold(
            account=team, amount=Money(2, "USD"), key=key, ttl=timedelta(hours=1), actor="test"
        ).hold_id
        for key in ("captured", "open")
    ]
    lines = spend(team, revenue, "1")
    charge = JournalRequest("delivery", "a", "usage", "USD", lines, "test", capture_hold=holds[0])
    undone = JournalRequest("delivery", "b", "usage", "USD", lines, "test")
    owing = JournalRequest(
        "delivery", "c", "usage", "USD", spend(team, revenue, "20"), "test", capture_hold=holds[0]
    )
    posted = post_journals([charge, undone])
    reverse_journal(journal_id=posted[1].journal_id, reason="test", actor="test")
    post_journals([owing])
    top_up = TopUp.objects.create(
        account=team,
        amount=Money(5, "USD"),
        idempotency_key="k",
        order_id="O",
        actor="test",
        state="approving",
    )
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT settle_apply('paypal', 'capture', 'C', 'O', %s, %s, %s, %s, 'USD', 5, 1, 'test', now())",
            [top_up.pk, team.pk, clearing.pk, fees.pk],
        )
    settle_refund(
        provider="paypal",
        external_id="F",
        capture_id="C",
        amount=Money(1, "USD"),
        fee=Decimal("0.2"),
        actor="test",
    )
    from tests.ledger.grant_books import use_grants

    use_grants(revenue)
    return {"w": team.pk, "r": revenue.pk}


@pytest.fixture
def paypal(settings, tmp_path) -> Iterator[RunningStub]:
    """The loopback PayPal, which the settings name."""
    forget_certificates()
    for throttle in (audited, questions, fetches):
        throttle.forget()
    signer().write_authority(tmp_path)
    with running_stub() as stub:
        settings.PAYPAL_MODE, settings.PAYPAL_STUB_URL = "stub", stub.url
        settings.PAYPAL_STUB_CA = str(tmp_path / "ca.pem")
        yield stub


@pytest.fixture
def eager_tasks() -> Iterator[None]:
    """Celery tasks run at once, where they are sent."""
    before = app.conf.task_always_eager
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = before
