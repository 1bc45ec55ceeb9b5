"""Wallets and accounts for the ledger's tests."""

from __future__ import annotations

import uuid
from decimal import Decimal

import pytest

from ledger.models import Account
from ledger.services import Line, open_wallet, platform_account, post_journal


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
