"""The merchant's side after the sale: refunds, disputes, reports, and the check of a signature."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import datetime
from decimal import Decimal
from typing import Any

from aiohttp import web

from ledger.paypal.stub.api import Answer, error, run, value_problem
from ledger.paypal.stub.signing import signer
from ledger.paypal.stub.state import STUB, Stub
from ledger.paypal.stub.store import money, utc_now


async def refund_capture(request: web.Request) -> web.StreamResponse:
    return await run(request, "refund", _refund)


async def get_refund(request: web.Request) -> web.StreamResponse:
    return await run(request, "get_refund", _get_refund)


async def get_dispute(request: web.Request) -> web.StreamResponse:
    return await run(request, "get_dispute", _get_dispute)


async def search(request: web.Request) -> web.StreamResponse:
    return await run(request, "search", _search)


async def balances(request: web.Request) -> web.StreamResponse:
    return await run(request, "balances", _balances)


async def verify(request: web.Request) -> web.StreamResponse:
    return await run(request, "verify", _verify)


async def certificate(request: web.Request) -> web.StreamResponse:
    stub = request.app[STUB]
    if stub.faults.take("certificate", "error"):
        return web.Response(status=500)
    if request.match_info["certificate_id"] != signer().certificate_id:
        return web.Response(status=404)
    return web.Response(body=signer().certificate_pem, content_type="text/plain")


def shown_refund(stub: Stub, refund: dict[str, Any]) -> dict[str, Any]:
    """As the API shows it."""
    currency, value = refund["amount"]["currency_code"], Decimal(refund["amount"]["value"])
    fee, base = Decimal(refund["fee_back"]), stub.webhooks.base
    return {
        "id": refund["id"],
        "status": refund["status"],
        "amount": refund["amount"],
        "custom_id": refund["custom_id"],
        "note_to_payer": refund["note_to_payer"],
        "seller_payable_breakdown": {
            "gross_amount": refund["amount"],
            "paypal_fee": money(fee, currency),
            "net_amount": money(value - fee, currency),
            "total_refunded_amount": money(stub.store.taken_of(refund["capture_id"]), currency),
        }
        | ({"net_amount_in_receivable_currency": refund["home"]} if "home" in refund else {}),
        "create_time": refund["create_time"],
        "update_time": refund["update_time"],
        "links": [
            {"href": f"{base}/v2/payments/refunds/{refund['id']}", "rel": "self", "method": "GET"},
            {"href": f"{base}/v2/payments/captures/{refund['capture_id']}", "rel": "up", "method": "GET"},
        ],
    }


def _refund(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    found = stub.store.find_capture(request.match_info["capture_id"])
    if found is None:
        return _unknown()
    order, capture = found
    currency = capture["amount"]["currency_code"]
    left = Decimal(capture["amount"]["value"]) - stub.store.taken_of(capture["id"])
    amount = body.get("amount") or money(left, currency)
    if (problem := value_problem(amount, "/amount")) is not None:
        return problem
    if amount["currency_code"] != currency:
        return error(422, "CURRENCY_MISMATCH", "Currency must be the same as that of the capture.", "/amount")
    if stub.faults.take("refund", "declined"):
        return error(422, "REFUND_FAILED_INSUFFICIENT_FUNDS", "The account has not enough funds.")
    if "seller_receivable_breakdown" not in capture:
        return error(422, "CAPTURE_STATUS_NOT_VALID", "A pending capture can not be refunded.")
    if left == 0:
        return error(422, "CAPTURE_FULLY_REFUNDED", "The capture has already been fully refunded.")
    if Decimal(amount["value"]) > left:
        return error(422, "REFUND_AMOUNT_EXCEEDED", "The refund is more than what is left of the capture.")
    pending = stub.faults.take("refund", "pending")
    refund = stub.store.add_refund(
        order, capture, Decimal(amount["value"]), fee_back=Decimal(stub.faults.fee_back), pending=pending,
        custom_id=str(body.get("custom_id") or ""), note=str(body.get("note_to_payer") or ""),
    )  # fmt: skip
    if not pending:
        tell_refund(stub, refund)
    return 201, shown_refund(stub, refund)


def tell_refund(stub: Stub, refund: dict[str, Any]) -> None:
    """By both channels."""
    found = stub.store.find_capture(refund["capture_id"])
    assert found is not None
    kind, word = ("REFUNDED", "Refunded") if refund["code"] == "T1107" else ("REVERSED", "Reversed")
    if refund["status"] == "FAILED":
        stub.webhooks.refund_event(
            "PAYMENT.REFUND.FAILED", shown_refund(stub, refund), stub.faults.webhook_copies
        )
        return
    stub.webhooks.refund_event(
        f"PAYMENT.CAPTURE.{kind}", shown_refund(stub, refund), stub.faults.webhook_copies
    )
    stub.notifications.undoing(found[1], refund, status=word, txn_id=refund["id"])


def _get_refund(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    refund = stub.store.refunds.get(request.match_info["refund_id"])
    return (200, shown_refund(stub, refund)) if refund else _unknown()


def _get_dispute(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    dispute = stub.store.disputes.get(request.match_info["dispute_id"])
    return (200, dispute) if dispute else _unknown()


def _search(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    try:
        start, end = (datetime.fromisoformat(request.query[name]) for name in ("start_date", "end_date"))
        page, size = int(request.query.get("page", "1")), int(request.query.get("page_size", "100"))
    except (KeyError, ValueError):
        return error(400, "INVALID_PARAMETER_SYNTAX", "start_date and end_date are needed.")
    if (end - start).days > 31 or end < start or not 1 <= size <= 500:
        return error(400, "INVALID_REQUEST", "Date range is greater than 31 days.")
    within = [
        movement
        for movement in stub.store.movements
        if start <= datetime.fromisoformat(movement["at"]) <= end
    ]
    shown = within[(page - 1) * size : page * size]
    return 200, {
        "transaction_details": [{"transaction_info": _info(movement)} for movement in shown],
        "account_number": "STUBMERCHANT1",
        "start_date": request.query["start_date"],
        "end_date": request.query["end_date"],
        "last_refreshed_datetime": utc_now(),
        "page": page,
        "total_items": len(within),
        "total_pages": max(1, -(-len(within) // size)),
        "links": [],
    }


def _info(movement: dict[str, Any]) -> dict[str, Any]:
    info = {
        "transaction_id": movement["transaction_id"],
        "transaction_event_code": movement["code"],
        "transaction_initiation_date": movement["at"],
        "transaction_updated_date": movement["at"],
        "transaction_amount": money(Decimal(movement["gross"]), movement["currency"]),
        "transaction_status": "S",
    }
    if Decimal(movement["fee"]):
        info["fee_amount"] = money(Decimal(movement["fee"]), movement["currency"])
    if movement["reference_id"]:
        info |= {"paypal_reference_id": movement["reference_id"], "paypal_reference_id_type": "TXN"}
    if movement["invoice_id"]:
        info |= {"invoice_id": movement["invoice_id"], "custom_field": movement["invoice_id"]}
    return info


def _balances(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    at = datetime.fromisoformat(request.query.get("as_of_time", utc_now()))
    totals: defaultdict[str, Decimal] = defaultdict(Decimal)
    for movement in stub.store.movements:
        if datetime.fromisoformat(movement["at"]) <= at:
            totals[movement["currency"]] += Decimal(movement["gross"]) + Decimal(movement["fee"])
    return 200, {
        "balances": [
            {"currency": currency, "primary": currency == "USD", "total_balance": money(total, currency),
             "available_balance": money(total, currency), "withheld_balance": money(Decimal(0), currency)}
            for currency, total in totals.items()
        ],
        "account_id": "STUBMERCHANT1",
        "as_of_time": utc_now(),
        "last_refresh_time": utc_now(),
    }  # fmt: skip


def _verify(stub: Stub, request: web.Request, body: dict[str, Any]) -> Answer:
    """Vouches for the signature that the stub itself would make. Unlike PayPal, over the body as JSON prints it."""
    event = json.dumps(body.get("webhook_event")).encode()
    same = body.get("webhook_id") == stub.webhooks.webhook_id and body.get(
        "transmission_sig"
    ) == signer().sign(
        transmission_id=str(body.get("transmission_id")),
        transmission_time=str(body.get("transmission_time")),
        webhook_id=str(body.get("webhook_id")),
        body=event,
    )
    return 200, {"verification_status": "SUCCESS" if same else "FAILURE"}


def _unknown() -> Answer:
    return error(404, "INVALID_RESOURCE_ID", "Specified resource ID does not exist.")
