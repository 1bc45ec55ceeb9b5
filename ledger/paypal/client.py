"""PayPal's Orders v2 behind the gateway contract, through PayPal's own SDK."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from apimatic_core.exceptions.auth_validation_exception import AuthValidationException
from django.conf import settings
from djmoney.money import Money
from paypalserversdk.configuration import Configuration, Environment, Server
from paypalserversdk.exceptions.api_exception import ApiException
from paypalserversdk.http.auth.o_auth_2 import ClientCredentialsAuthCredentials
from paypalserversdk.models.amount_with_breakdown import AmountWithBreakdown
from paypalserversdk.models.checkout_payment_intent import CheckoutPaymentIntent
from paypalserversdk.models.order_request import OrderRequest
from paypalserversdk.models.payment_source import PaymentSource
from paypalserversdk.models.paypal_wallet import PaypalWallet
from paypalserversdk.models.paypal_wallet_experience_context import PaypalWalletExperienceContext
from paypalserversdk.models.purchase_unit_request import PurchaseUnitRequest
from paypalserversdk.paypal_serversdk_client import PaypalServersdkClient
from requests import RequestException

from ledger.paypal.gateway import (
    Capture,
    CaptureStatus,
    GatewayRefused,
    GatewayUnavailable,
    Order,
    OrderStatus,
    PaymentGateway,
)

TIMEOUT_S = 15
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


class StubConfiguration(Configuration):
    """The SDK pointed at the loopback PayPal instead of PayPal's sandbox."""

    def get_base_uri(self, server: Server = Server.DEFAULT) -> str:
        return settings.PAYPAL_STUB_URL


class PayPalOrders(PaymentGateway):
    provider = "paypal"

    def check_amount(self, amount: Money) -> None:
        decimals = 0 if str(amount.currency) in _WHOLE_ONLY else 2
        if amount.amount <= 0 or amount.amount != round(amount.amount, decimals):
            raise ValueError(
                f"PayPal takes {amount.currency} above zero with {decimals} decimals, not {amount.amount}"
            )

    def create_order(
        self, *, amount: Money, reference: str, request_id: str, return_url: str, cancel_url: str
    ) -> Order:
        self.check_amount(amount)
        currency = str(amount.currency)
        decimals = 0 if currency in _WHOLE_ONLY else 2
        body = OrderRequest(
            intent=CheckoutPaymentIntent.CAPTURE,
            purchase_units=[
                PurchaseUnitRequest(
                    amount=AmountWithBreakdown(currency_code=currency, value=f"{amount.amount:.{decimals}f}"),
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
        return _ask(
            lambda client: client.orders.create_order(
                {"body": body, "paypal_request_id": request_id, "prefer": _WHOLE_ANSWER}
            )
        )

    def read_order(self, order_id: str) -> Order:
        return _ask(lambda client: client.orders.get_order({"id": order_id}))

    def capture_order(self, order_id: str, *, request_id: str) -> Order:
        return _ask(
            lambda client: client.orders.capture_order(
                {"id": order_id, "paypal_request_id": request_id, "prefer": _WHOLE_ANSWER}
            )
        )


def _ask(call: Callable[[PaypalServersdkClient], Any]) -> Order:
    """One call; a token that PayPal does not know any more is replaced once."""
    mode = (settings.PAYPAL_MODE, settings.PAYPAL_STUB_URL)
    credentials = (settings.PAYPAL_CLIENT_ID, settings.PAYPAL_CLIENT_SECRET)
    try:
        answer = call(_client(*mode, *credentials))
    except ApiException as error:
        if error.response_code != 401:
            raise _meaning(error) from None
        _client.cache_clear()
        try:
            answer = call(_client(*mode, *credentials))
        except (ApiException, AuthValidationException, RequestException) as second:
            raise _meaning(second) from None
    except (AuthValidationException, RequestException) as error:
        raise _meaning(error) from None
    return _order(answer.body)


@lru_cache(maxsize=1)
def _client(mode: str, stub_url: str, client_id: str, client_secret: str) -> PaypalServersdkClient:
    """Kept, because it keeps the access token."""
    environment = Environment.PRODUCTION if mode == "live" else Environment.SANDBOX
    configuration = StubConfiguration if mode == "stub" else Configuration
    return PaypalServersdkClient(
        config=configuration(
            environment=environment,
            timeout=TIMEOUT_S,
            client_credentials_auth_credentials=ClientCredentialsAuthCredentials(
                o_auth_client_id=client_id, o_auth_client_secret=client_secret
            ),
        )
    )


def _meaning(error: Exception) -> Exception:
    """Only a 4xx about the request itself is a no. All else leaves open what happened."""
    if isinstance(error, AuthValidationException):
        return GatewayUnavailable("PayPal gave no access token: check PAYPAL_CLIENT_ID and its secret")
    if isinstance(error, ApiException) and error.response_code in {400, 404, 422}:
        details = getattr(error, "details", None) or []
        issue = getattr(details[0], "issue", None) if details else None
        name = getattr(error, "name", None) or f"HTTP {error.response_code}"
        return GatewayRefused(issue or name, getattr(error, "message", None) or "")
    if isinstance(error, ApiException):
        return GatewayUnavailable(f"PayPal answered {error.response_code}")
    return GatewayUnavailable(f"PayPal did not answer ({type(error).__name__})")


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
        captured_at=datetime.fromisoformat(capture.create_time).astimezone(UTC),
    )
