"""Wallets and accounts for the ledger's tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from decimal import Decimal

import pytest

from apex.celery import app
from ledger.models import Account
from ledger.services import Line, open_wallet, platform_account, post_journal
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
def paypal(settings) -> Iterator[RunningStub]:
    """The loopback PayPal, which the settings name."""
    with running_stub() as stub:
        settings.PAYPAL_MODE, settings.PAYPAL_STUB_URL = "stub", stub.url
        yield stub


@pytest.fixture
def eager_tasks() -> Iterator[None]:
    """Celery tasks run at once, where they are sent."""
    before = app.conf.task_always_eager
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = before
