"""Buying credits, the same from the portal and from the API."""

from __future__ import annotations

import logging
from decimal import Decimal

from django.conf import settings
from django.urls import reverse
from djmoney.money import Money

from brokerage.models import Customer
from ledger.models import TopUp
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable
from ledger.paypal.orders import start_top_up

# In the customer's currency. Below, the provider's fee eats too much; above, a person should look.
TOP_UP_MIN, TOP_UP_MAX = Decimal(5), Decimal(5000)

log = logging.getLogger(__name__)


class PurchaseFailed(Exception):
    """PayPal did not take the order and nothing was charged. The message is for the buyer."""


def start_purchase(*, customer: Customer, amount: Money, actor: str, key: str) -> TopUp:
    """The purchase under that key; `approve_url` is where the payer agrees.

    Raises PurchaseFailed, and IdempotencyConflict when the key was used for another amount.
    """
    try:
        return start_top_up(
            wallet_code=customer.wallet_code,
            amount=amount,
            actor=actor,
            idempotency_key=key,
            return_url=settings.PUBLIC_URL + reverse("portal:credits-return"),
            cancel_url=settings.PUBLIC_URL + reverse("portal:credits-cancel"),
        )
    except GatewayUnavailable as error:
        log.warning("purchase %s waits: PayPal does not answer", key)
        raise PurchaseFailed(
            "PayPal does not answer just now. Nothing was charged; try again in a minute."
        ) from error
    except GatewayRefused as refusal:
        log.warning("purchase %s refused: %s", key, refusal.issue)
        raise PurchaseFailed(
            "PayPal refused this payment. Nothing was charged; try another amount."
        ) from refusal
