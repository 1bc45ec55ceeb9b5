"""Buying credits, the same from the portal and from the API."""

from __future__ import annotations

from django.conf import settings
from django.urls import reverse
from djmoney.money import Money

from brokerage.models import Customer
from ledger.models import TopUp


class PurchaseFailed(Exception):
    """PayPal did not take the order. The message is for the buyer."""


def start_purchase(*, customer: Customer, amount: Money, actor: str, key: str) -> TopUp:
    """The purchase under that key, with the address where the payer agrees. Raises PurchaseFailed."""
    from ledger.paypal.orders import start_top_up

    return start_top_up(
        wallet_code=customer.wallet_code,
        amount=amount,
        actor=actor,
        idempotency_key=key,
        return_url=settings.PUBLIC_URL + reverse("portal:credits-return"),
        cancel_url=settings.PUBLIC_URL + reverse("portal:credits-cancel"),
    )


def note_return(top_up: TopUp) -> None: ...
