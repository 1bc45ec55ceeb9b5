"""The rails by name. A purchase stays on the rail it began on."""

from __future__ import annotations

from ledger.paypal.client import PayPalOrders
from ledger.paypal.gateway import PaymentGateway
from ledger.paypal.ipn.rail import PayPalIpn


def gateway(rail: str) -> PaymentGateway:
    """`orders` or `ipn`."""
    rails: dict[str, PaymentGateway] = {"orders": PayPalOrders(), "ipn": PayPalIpn()}
    return rails[rail]
