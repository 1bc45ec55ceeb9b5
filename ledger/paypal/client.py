"""The rail `orders`: PayPal's Orders v2, through PayPal's own SDK."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from djmoney.money import Money
from paypalserversdk.models.amount_with_breakdown import AmountWithBreakdown
from paypalserversdk.models.checkout_payment_intent import CheckoutPaymentIntent
from paypalserversdk.models.money import Money as ApiMoney
from paypalserversdk.models.order_request import OrderRequest
from paypalserversdk.models.payment_source import PaymentSource
from paypalserversdk.models.paypal_wallet import PaypalWallet
from paypalserversdk.models.paypal_wallet_experience_context import PaypalWalletExperienceContext
from paypalserversdk.models.purchase_unit_request import PurchaseUnitRequest
from paypalserversdk.models.refund_request import RefundRequest

from ledger.paypal.api import ask
from ledger.paypal.gateway import (
    Capture,
    CaptureStatus,
    GatewayUnavailable,
    Order,
    OrderStatus,
    Return,
    ReturnKind,
    ReturnStatus,
)

# PayPal takes these without a fraction, all others with two decimals.
_WHOLE_ONLY = frozenset({"HUF", "JPY", "TWD"})
_WHOLE_ANSWER = "return=representation"  # the default leaves out amounts and fees

_ORDER_STATUS = {
    "CREATED": OrderStatus.OPEN,
    "SAVED": OrderStatus.OPEN,
    "PAYER_ACTION_REQUIRED": OrderStatus.OPEN,
    "APPROVED": OrderStatus.APPROVED,
    "COMPLETED": OrderStatus.COMPLETED,
    "VOIDED": OrderStatus.VOID,
}
_CAPTURE_STATUS = {
    "COMPLETED": CaptureStatus.COMPLETED,
    # What was given back later had been taken first.
    "PARTIALLY_REFUNDED": CaptureStatus.COMPLETED,
    "REFUNDED": CaptureStatus.COMPLETED,
    "PENDING": CaptureStatus.PENDING,
    "DECLINED": CaptureStatus.FAILED,
    "FAILED": CaptureStatus.FAILED,
}
_RETURN_STATUS = {
    "COMPLETED": ReturnStatus.COMPLETED,
    "PENDING": ReturnStatus.PENDING,
    "FAILED": ReturnStatus.FAILED,
    "CANCELLED": ReturnStatus.FAILED,
}


def check_amount(amount: Money) -> None:
    """Raises ValueError when PayPal cannot take this amount exactly."""
    decimals = _decimals(str(amount.currency))
    if amount.amount <= 0 or amount.amount != round(amount.amount, decimals):
        raise ValueError(
            f"PayPal takes {amount.currency} above zero with {decimals} decimals, not {amount.amount}"
        )


def amount_text(amount: Money) -> str:
    """As PayPal wants to read it: `10.00`, `500`."""
    return f"{amount.amount:.{_decimals(str(amount.currency))}f}"


def _decimals(currency: str) -> int:
    return 0 if currency in _WHOLE_ONLY else 2


class PayPalOrders:
    """Implements PaymentGateway."""

    provider = "paypal"
    rail = "orders"

    def check_amount(self, amount: Money) -> None:
        check_amount(amount)

    def create_order(
        self, *, amount: Money, reference: str, request_id: str, return_url: str, cancel_url: str
    ) -> Order:
        self.check_amount(amount)
        body = OrderRequest(
            intent=CheckoutPaymentIntent.CAPTURE,
            purchase_units=[
                PurchaseUnitRequest(
                    amount=AmountWithBreakdown(currency_code=str(amount.currency), value=amount_text(amount)),
                    custom_id=reference,
                    invoice_id=reference,
                    description="Apex credit",
                )
            ],
            payment_source=PaymentSource(
                paypal=PaypalWallet(
                    experience_context=PaypalWalletExperienceContext(
                        return_url=return_url,
                        cancel_url=cancel_url,
                        user_action="PAY_NOW",
                        shipping_preference="NO_SHIPPING",
                    )
                )
            ),
        )
        options = {"body": body, "paypal_request_id": request_id, "prefer": _WHOLE_ANSWER}
        return _order(ask(lambda client: client.orders.create_order(options)))

    def read_order(self, order_id: str) -> Order:
        return _order(ask(lambda client: client.orders.get_order({"id": order_id})))

    def capture_order(self, order_id: str, *, request_id: str) -> Order:
        options = {"id": order_id, "paypal_request_id": request_id, "prefer": _WHOLE_ANSWER}
        return _order(ask(lambda client: client.orders.capture_order(options)))

    def refund_capture(
        self, capture_id: str, *, amount: Money, reference: str, request_id: str, note: str
    ) -> Return:
        self.check_amount(amount)
        body = RefundRequest(
            amount=ApiMoney(currency_code=str(amount.currency), value=amount_text(amount)),
            custom_id=reference,
            note_to_payer=note or None,
        )
        options = {
            "capture_id": capture_id,
            "body": body,
            "paypal_request_id": request_id,
            "prefer": _WHOLE_ANSWER,
        }
        return _return(ask(lambda client: client.payments.refund_captured_payment(options)))

    def read_return(self, external_id: str) -> Return:
        """PayPal shows a reversal as a refund: the kind is told by whatever spoke of it."""
        return _return(ask(lambda client: client.payments.get_refund({"refund_id": external_id})))


def _order(order: Any) -> Order:
    links = {link.rel: link.href for link in getattr(order, "links", None) or []}
    units = getattr(order, "purchase_units", None) or []
    captures = [
        _capture(capture)
        for unit in units
        for capture in getattr(getattr(unit, "payments", None), "captures", None) or []
    ]
    status = str(order.status)
    if status not in _ORDER_STATUS:
        raise GatewayUnavailable(f"PayPal has an order status that is not known here: {status}")
    return Order(
        order_id=order.id,
        status=_ORDER_STATUS[status],
        approve_url=links.get("payer-action") or links.get("approve") or "",
        reference=(getattr(units[0], "custom_id", None) or "") if units else "",
        captures=captures,
        refund_ids=[
            refund.id
            for unit in units
            for refund in getattr(getattr(unit, "payments", None), "refunds", None) or []
        ],
    )


def _capture(capture: Any) -> Capture:
    status = _CAPTURE_STATUS.get(str(capture.status), CaptureStatus.PENDING)
    breakdown = getattr(capture, "seller_receivable_breakdown", None)
    if status is CaptureStatus.COMPLETED and breakdown is None:
        # Without its fee it cannot be booked; PayPal completes the picture shortly after.
        status = CaptureStatus.PENDING
    fee = getattr(breakdown, "paypal_fee", None)
    return Capture(
        external_id=capture.id,
        status=status,
        currency=capture.amount.currency_code,
        gross=Decimal(breakdown.gross_amount.value if breakdown else capture.amount.value),
        fee=Decimal(fee.value) if fee else Decimal(0),
        captured_at=_moment(capture.create_time),
        converted=_converted(getattr(breakdown, "receivable_amount", None), capture.amount.currency_code),
    )


def _return(refund: Any) -> Return:
    breakdown = getattr(refund, "seller_payable_breakdown", None)
    fee = getattr(breakdown, "paypal_fee", None)
    parents = [link.href for link in getattr(refund, "links", None) or [] if link.rel == "up"]
    if not parents or str(refund.status) not in _RETURN_STATUS:
        raise GatewayUnavailable(f"PayPal tells of refund {refund.id} without its capture or status")
    return Return(
        external_id=refund.id,
        capture_id=parents[0].rstrip("/").rpartition("/")[2],
        kind=ReturnKind.REFUND,
        status=_RETURN_STATUS[str(refund.status)],
        currency=refund.amount.currency_code,
        gross=Decimal(refund.amount.value),
        fee=Decimal(fee.value) if fee else Decimal(0),
        reference=getattr(refund, "custom_id", None) or "",
        occurred_at=_moment(refund.create_time),
        converted=_converted(
            getattr(breakdown, "net_amount_in_receivable_currency", None), refund.amount.currency_code
        ),
    )


def _converted(amount: Any, currency: str) -> Money | None:
    """An amount that PayPal tells in our own currency, when that is another one than the payer's."""
    if amount is None or amount.currency_code == currency:
        return None
    return Money(amount.value, amount.currency_code)


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
