"""The merchant's side: token, create, get and capture of Orders v2."""

from __future__ import annotations

import asyncio
import base64
import binascii
import copy
import re
import secrets
from decimal import Decimal
from typing import Any

from aiohttp import web

from ledger.paypal.stub.state import STUB, Stub
from ledger.paypal.stub.store import WHOLE_ONLY, new_id, utc_now

_VALUE = re.compile(r"^\d{1,9}(\.\d+)?$")
# fmt: off
_CURRENCIES = WHOLE_ONLY | {
    "AUD", "BRL", "CAD", "CHF", "CNY", "CZK", "DKK", "EUR", "GBP", "HKD", "ILS", "MXN", "MYR", "NOK", "NZD",
    "PHP", "PLN", "SEK", "SGD", "THB", "USD",
}
# fmt: on
_NAMES = {
    400: ("INVALID_REQUEST", "Request is not well-formed, syntactically incorrect, or violates schema."),
    404: ("RESOURCE_NOT_FOUND", "The specified resource does not exist."),
    409: ("RESOURCE_CONFLICT", "The server has detected a conflict while processing this request."),
    422: (
        "UNPROCESSABLE_ENTITY",
        "The requested action could not be performed, semantically incorrect, or failed business validation.",
    ),
    500: ("INTERNAL_SERVER_ERROR", "An internal server error has occurred."),
}  # fmt: skip

# What changes something: repeated answers for a request id, and a short one unless asked for the whole.
_WRITES = frozenset({"create", "capture", "refund"})

Answer = tuple[int, dict[str, Any]]


def error(status: int, issue: str = "", description: str = "", field: str = "") -> Answer:
    """An error as PayPal writes it; `issue` is the machine's word for it."""
    name, message = _NAMES[status]
    details = (
        [{"issue": issue, "description": description} | ({"field": field} if field else {})] if issue else []
    )
    return status, {
        "name": name,
        "message": message,
        "debug_id": secrets.token_hex(7),
        "details": details,
        "links": [],
    }


async def token(request: web.Request) -> web.StreamResponse:
    stub = request.app[STUB]
    if stub.faults.take("token", "error"):
        return _json(error(500))
    scheme, _, encoded = request.headers.get("Authorization", "").partition(" ")
    try:
        client_id, _, secret = base64.b64decode(encoded).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        client_id = secret = ""
    if scheme.lower() != "basic" or not client_id or not secret:
        return _json((401, {"error": "invalid_client", "error_description": "Client Authentication failed"}))
    form = await request.post()
    if form.get("grant_type") != "client_credentials":
        return _json(
            (400, {"error": "unsupported_grant_type", "error_description": "Grant Type is not supported"})
        )
    stub.tokens.add(access := f"A21AA{secrets.token_urlsafe(60)}")
    return _json((200, {
        "scope": "https://uri.paypal.com/services/payments/payment", "access_token": access,
        "token_type": "Bearer", "app_id": "APP-80W284485P519543T", "expires_in": 32400, "nonce": utc_now(),
    }))  # fmt: skip


async def create_order(request: web.Request) -> web.StreamResponse:
    return await run(request, "create", _create)


async def get_order(request: web.Request) -> web.StreamResponse:
    return await run(request, "get", _get)


async def capture_order(request: web.Request) -> web.StreamResponse:
    return await run(request, "capture", _capture)


async def run(request: web.Request, operation: str, work: Any) -> web.StreamResponse:
    """Access token, faults, and the same answer to the same PayPal-Request-Id."""
    stub = request.app[STUB]
    if request.headers.get("Authorization", "").removeprefix("Bearer ") not in stub.tokens:
        return _json(
            (401, {"error": "invalid_token", "error_description": "Token signature verification failed"})
        )
    if stub.faults.take(operation, "error"):
        return _json(error(500))
    if stub.faults.take(operation, "busy"):
        return _json(error(409, "PREVIOUS_REQUEST_IN_PROGRESS", "A previous request is still in progress."))
    if stub.faults.take(operation, "slow"):
        await asyncio.sleep(stub.faults.delay_s)
    body = await _body(request)
    if body is None:
        return _json(error(400, "MALFORMED_REQUEST_JSON", "The request JSON is not well formed."))
    # No await from here to the save: two calls with one id are two calls in a row.
    key = f"{operation} {request.path} {request.headers.get('PayPal-Request-Id', '')}"
    writes = operation in _WRITES
    repeatable = writes and "PayPal-Request-Id" in request.headers
    known = stub.store.answers.get(key) if repeatable else None
    status, answer = (known["status"], known["body"]) if known else work(stub, request, body)
    if repeatable and status < 300:
        stub.store.answers[key] = {"status": status, "body": answer}
    if writes:
        stub.store.save()
    if stub.faults.take(operation, "lost"):
        assert request.transport is not None
        request.transport.abort()
        return web.Response()
    if status < 300 and writes and "return=representation" not in request.headers.get("Prefer", ""):
        answer = {name: answer[name] for name in ("id", "status", "links")}
    return _json((status, answer))


async def _body(request: web.Request) -> dict[str, Any] | None:
    if not await request.read():
        return {}
    try:
        body = await request.json()
    except ValueError:
        return None
    return body if isinstance(body, dict) else {}


def _create(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    if body.get("intent") != "CAPTURE":
        return error(422, "UNSUPPORTED_INTENT", "This stub knows intent=CAPTURE only.", "/intent")
    units = body.get("purchase_units")
    if not isinstance(units, list) or len(units) != 1 or not isinstance(units[0], dict):
        return error(400, "INVALID_ARRAY_MIN_ITEMS", "One purchase unit is needed.", "/purchase_units")
    field = "/purchase_units/@reference_id=='default'/amount"
    if (problem := value_problem(units[0].get("amount"), field)) is not None:
        return problem
    order_id = new_id()
    wallet = (body.get("payment_source") or {}).get("paypal")
    context = (wallet or {}).get("experience_context") or body.get("application_context") or {}
    base = f"{request.scheme}://{request.host}"
    order: dict[str, Any] = {
        "id": order_id,
        "intent": "CAPTURE",
        "status": "CREATED" if wallet is None else "PAYER_ACTION_REQUIRED",
        "purchase_units": [{"reference_id": "default"} | units[0]],
        "create_time": utc_now(),
        "update_time": utc_now(),
        "links": [
            {"href": f"{base}/v2/checkout/orders/{order_id}", "rel": "self", "method": "GET"},
            {
                "href": f"{base}/checkoutnow?token={order_id}",
                "rel": "approve" if wallet is None else "payer-action",
                "method": "GET",
            },
        ],
    }
    order["stub_addresses"] = {name: str(context.get(name, "")) for name in ("return_url", "cancel_url")}
    stub.store.orders[order_id] = order
    return 201, _copy(order)


def value_problem(amount: Any, field: str) -> Answer | None:
    """PayPal's refusal of an amount that is none, None for one that is."""
    value = amount.get("value") if isinstance(amount, dict) else None
    if not isinstance(value, str) or not _VALUE.match(value):
        return error(
            400,
            "INVALID_PARAMETER_SYNTAX",
            "The value of a field does not conform to the expected format.",
            f"{field}/value",
        )
    currency = amount.get("currency_code")
    if currency not in _CURRENCIES:
        return error(
            422,
            "CURRENCY_NOT_SUPPORTED",
            "Currency code is not currently supported.",
            f"{field}/currency_code",
        )
    if len(value.partition(".")[2]) > (0 if currency in WHOLE_ONLY else 2):
        return error(
            422,
            "DECIMAL_PRECISION",
            "The value of the field should not have more decimals.",
            f"{field}/value",
        )
    if Decimal(value) <= 0:
        return error(422, "CANNOT_BE_ZERO_OR_NEGATIVE", "Must be greater than zero.", f"{field}/value")
    return None


def _get(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    order = stub.store.orders.get(request.match_info["order_id"])
    return (200, _copy(order)) if order else _unknown()


def _capture(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    order = stub.store.orders.get(request.match_info["order_id"])
    if order is None:
        return _unknown()
    if order["status"] == "COMPLETED":
        return error(
            422,
            "ORDER_ALREADY_CAPTURED",
            "Order already captured. If 'intent=CAPTURE' only one capture per order is allowed.",
        )
    if order["status"] != "APPROVED":
        return error(422, "ORDER_NOT_APPROVED", "Payer has not yet approved the Order for payment.")
    if stub.faults.take("capture", "declined"):
        return error(
            422,
            "INSTRUMENT_DECLINED",
            "The instrument presented was either declined by the processor or bank.",
        )
    capture = stub.store.add_capture(order, pending=stub.faults.take("capture", "pending"))
    stub.webhooks.capture_event(order, capture, stub.faults.webhook_copies)
    stub.notifications.payment(capture, status="Pending" if capture["status"] == "PENDING" else "Completed")
    return 201, _copy(order)


def _unknown() -> Answer:
    return error(404, "INVALID_RESOURCE_ID", "Specified resource ID does not exist.")


def _copy(order: dict[str, Any]) -> dict[str, Any]:
    """As it stands now and as the merchant may see it."""
    return {name: copy.deepcopy(value) for name, value in order.items() if name != "stub_addresses"}


def _json(answer: Answer) -> web.Response:
    status, body = answer
    return web.json_response(body, status=status)
