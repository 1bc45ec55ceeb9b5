"""The payment gateway over notifications: an order is a link, and what became of it is what PayPal told us.

What counts are stored notifications that PayPal has vouched for. They come in any order and more than once,
so a payment is as far as the furthest of them: one that was completed is not pending again because an older
notification comes late.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from urllib.parse import urlencode

from django.conf import settings
from djmoney.money import Money

from ledger.models import InboundEvent
from ledger.paypal.client import amount_text, check_amount
from ledger.paypal.gateway import (
    Capture,
    CaptureStatus,
    GatewayRefused,
    Order,
    OrderStatus,
    Return,
    ReturnKind,
    ReturnStatus,
)
from ledger.paypal.ipn.message import IpnMessage, read_message

CHANNEL = "paypal.ipn"
_PAGES = {
    "live": "https://www.paypal.com/cgi-bin/webscr",
    "sandbox": "https://www.sandbox.paypal.com/cgi-bin/webscr",
}
# How far a payment is, by PayPal's word for it; further up overrules what is below.
PAYMENT_STATES: dict[str, tuple[int, CaptureStatus]] = {
    "Created": (0, CaptureStatus.PENDING),
    "Pending": (1, CaptureStatus.PENDING),
    "In-Progress": (1, CaptureStatus.PENDING),
    "Denied": (2, CaptureStatus.FAILED),
    "Failed": (2, CaptureStatus.FAILED),
    "Expired": (2, CaptureStatus.FAILED),
    "Voided": (2, CaptureStatus.FAILED),
    "Completed": (3, CaptureStatus.COMPLETED),
    "Processed": (3, CaptureStatus.COMPLETED),
}
RETURN_STATES = {
    "Refunded": ReturnKind.REFUND,
    "Partially_Refunded": ReturnKind.REFUND,
    "Reversed": ReturnKind.REVERSAL,
    "Canceled_Reversal": ReturnKind.REVERSAL_CANCELLED,
}


class PayPalIpn:
    """Implements PaymentGateway. Our reference is the order's id."""

    provider = "paypal"
    rail = "ipn"

    def check_amount(self, amount: Money) -> None:
        check_amount(amount)

    def create_order(
        self, *, amount: Money, reference: str, request_id: str, return_url: str, cancel_url: str
    ) -> Order:
        """No call: PayPal learns of it when the payer opens the link. `invoice` makes PayPal refuse a second payment."""
        self.check_amount(amount)
        page = _PAGES.get(settings.PAYPAL_MODE, f"{settings.PAYPAL_STUB_URL}/cgi-bin/webscr")
        query = {
            "cmd": "_xclick",
            "business": settings.PAYPAL_RECEIVER,
            "item_name": "Apex credit",
            "amount": amount_text(amount),
            "currency_code": str(amount.currency),
            "invoice": reference,
            "custom": reference,
            "no_shipping": "1",
            "charset": "utf-8",
            "return": return_url,
            "cancel_return": cancel_url,
            "notify_url": f"{settings.PUBLIC_URL}/v1/paypal/ipn",
        }
        return Order(reference, OrderStatus.OPEN, f"{page}?{urlencode(query)}", reference, [])

    def read_order(self, order_id: str) -> Order:
        captures = _captures(messages_about(order_id))
        status = OrderStatus.COMPLETED if captures else OrderStatus.OPEN
        return Order(order_id, status, "", order_id, captures)

    def capture_order(self, order_id: str, *, request_id: str) -> Order:
        """The payer's consent is the capture."""
        return self.read_order(order_id)

    def refund_capture(
        self, capture_id: str, *, amount: Money, reference: str, request_id: str, note: str
    ) -> Return:
        raise GatewayRefused(
            "NOT_ON_THIS_RAIL", "refund it on PayPal's own pages; its notification books the refund here"
        )

    def read_return(self, external_id: str) -> Return:
        for message in messages_about(external_id):
            if message.txn_id == external_id and message.payment_status in RETURN_STATES:
                return return_of(message)
        raise GatewayRefused("RESOURCE_NOT_FOUND", f"PayPal has told nothing of {external_id}")


def messages_about(about: str) -> list[IpnMessage]:
    """What PayPal vouched for of a purchase (our reference) or of a movement that has no such reference."""
    events = InboundEvent.objects.filter(channel=CHANNEL, verified=True, about=about).order_by("pk")
    return [read_message(bytes(raw)) for raw in events.values_list("raw", flat=True)]


def return_of(message: IpnMessage) -> Return:
    """Raises Malformed."""
    return Return(
        external_id=message.txn_id,
        capture_id=message.parent_txn_id,
        kind=RETURN_STATES[message.payment_status],
        status=ReturnStatus.COMPLETED,
        currency=message.mc_currency,
        gross=abs(message.amount("mc_gross")),
        fee=abs(message.amount("mc_fee")),
        reference="",
        occurred_at=message.paid_at,
    )


def _captures(messages: Iterable[IpnMessage]) -> list[Capture]:
    furthest: dict[str, IpnMessage] = {}
    for message in messages:
        if message.payment_status not in PAYMENT_STATES or message.parent_txn_id:
            continue
        known = furthest.get(message.txn_id)
        if known is None or _rank(message) > _rank(known):
            furthest[message.txn_id] = message
    return [_capture(message) for message in furthest.values()]


def _rank(message: IpnMessage) -> int:
    return PAYMENT_STATES[message.payment_status][0]


def _capture(message: IpnMessage) -> Capture:
    status = PAYMENT_STATES[message.payment_status][1]
    return Capture(
        external_id=message.txn_id,
        status=status,
        currency=message.mc_currency,
        gross=message.amount("mc_gross"),
        fee=message.amount("mc_fee") if status is CaptureStatus.COMPLETED else Decimal(0),
        captured_at=message.paid_at,
    )
