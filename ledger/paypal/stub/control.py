"""The control endpoints: they play the payer, the payer's bank and the reviewer, and break things."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from aiohttp import web

from ledger.paypal.stub.aftersale import shown_refund, tell_refund
from ledger.paypal.stub.pages import approve_order
from ledger.paypal.stub.state import STUB
from ledger.paypal.stub.store import money, new_id, utc_now


async def approve(request: web.Request) -> web.Response:
    """POST /control/orders/ID/approve: the payer agrees, without a browser."""
    order = _control_order(request)
    approve_order(request.app[STUB], order)
    return web.json_response({"status": order["status"]})


async def complete(request: web.Request) -> web.Response:
    """POST /control/orders/ID/complete: a pending capture is decided; ?declined=1 against the merchant."""
    stub, order = request.app[STUB], _control_order(request)
    if not order["purchase_units"][0].get("payments"):
        raise web.HTTPConflict(text="nothing is captured yet")
    capture = stub.store.complete_capture(order, declined=request.query.get("declined") == "1")
    stub.store.save()
    stub.webhooks.capture_event(order, capture, stub.faults.webhook_copies)
    stub.notifications.payment(capture, status="Denied" if capture["status"] == "DECLINED" else "Completed")
    return web.json_response({"status": capture["status"]})


async def set_faults(request: web.Request) -> web.Response:
    """POST /control/faults {"operation", "kind", "times"} and, optional, "delay_s", "webhook_copies", "fee_back"."""
    stub, wanted = request.app[STUB], await request.json()
    stub.faults.delay_s = float(wanted.get("delay_s", stub.faults.delay_s))
    stub.faults.webhook_copies = int(wanted.get("webhook_copies", stub.faults.webhook_copies))
    stub.faults.fee_back = str(wanted.get("fee_back", stub.faults.fee_back))
    if "operation" in wanted or "kind" in wanted:
        try:
            stub.faults.set(wanted.get("operation", ""), wanted.get("kind", ""), int(wanted.get("times", 1)))
        except ValueError as problem:
            raise web.HTTPBadRequest(text=str(problem)) from None
    return web.json_response(stub.faults.shown())


async def clear_faults(request: web.Request) -> web.Response:
    request.app[STUB].faults.clear()
    return web.json_response(request.app[STUB].faults.shown())


async def set_webhook(request: web.Request) -> web.Response:
    """PUT /control/webhook {"url", "held"}: where events go (empty: nowhere), and whether they wait for a release."""
    webhooks, wanted = request.app[STUB].webhooks, await request.json()
    webhooks.url = str(wanted.get("url", webhooks.url))
    webhooks.held = bool(wanted.get("held", webhooks.held))
    return web.json_response({"url": webhooks.url, "held": webhooks.held})


async def release_webhooks(request: web.Request) -> web.Response:
    """POST /control/webhook/release?order=sent|reversed|shuffled: sends what waited."""
    sent = request.app[STUB].webhooks.release(request.query.get("order", "sent"))
    return web.json_response({"sent": sent})


async def set_notifications(request: web.Request) -> web.Response:
    """PUT /control/ipn {"url"}: where notifications go; empty: nowhere."""
    request.app[STUB].notifications.url = str((await request.json()).get("url", ""))
    return web.json_response({"url": request.app[STUB].notifications.url})


async def complete_refund(request: web.Request) -> web.Response:
    """POST /control/refunds/ID/complete: a pending refund is sent; ?failed=1: it, or a sent one, did not arrive."""
    stub = request.app[STUB]
    refund = stub.store.refunds.get(request.match_info["refund_id"])
    if refund is None:
        raise web.HTTPNotFound(text="there is no such refund")
    stub.store.complete_refund(refund, failed=request.query.get("failed") == "1")
    stub.store.save()
    tell_refund(stub, refund)
    return web.json_response(shown_refund(stub, refund))


async def reverse(request: web.Request) -> web.Response:
    """POST /control/captures/ID/reverse {"value"}: the payer's bank takes the money back (default: what is left)."""
    stub = request.app[STUB]
    order, capture = _control_capture(request)
    left = Decimal(capture["amount"]["value"]) - stub.store.taken_of(capture["id"])
    value = Decimal(str((await _wanted(request)).get("value", left)))
    refund = stub.store.add_refund(
        order, capture, value, fee_back=Decimal(stub.faults.fee_back), code="T1201"
    )
    stub.store.save()
    tell_refund(stub, refund)
    return web.json_response({"id": refund["id"]})


async def cancel_reversal(request: web.Request) -> web.Response:
    """POST /control/reversals/ID/cancel: the money comes back. PayPal has no webhook for that, only IPN and reports."""
    stub = request.app[STUB]
    refund = stub.store.refunds.get(request.match_info["refund_id"])
    if refund is None:
        raise web.HTTPNotFound(text="there is no such reversal")
    found = stub.store.find_capture(refund["capture_id"])
    assert found is not None
    refund["cancelled"], back = True, new_id()
    value, fee = Decimal(refund["amount"]["value"]), Decimal(refund["fee_back"])
    stub.store.move(
        back, "T1202", refund["amount"]["currency_code"], value, -fee, reference_id=refund["capture_id"]
    )
    stub.store.save()
    stub.notifications.undoing(found[1], refund, status="Canceled_Reversal", txn_id=back)
    return web.json_response({"id": back})


async def open_dispute(request: web.Request) -> web.Response:
    """POST /control/captures/ID/dispute {"value"}: the payer complains."""
    stub = request.app[STUB]
    _, capture = _control_capture(request)
    value = Decimal(str((await _wanted(request)).get("value", capture["amount"]["value"])))
    dispute: dict[str, Any] = {
        "dispute_id": f"PP-D-{new_id()[:6]}",
        "create_time": utc_now(),
        "update_time": utc_now(),
        "disputed_transactions": [
            {"seller_transaction_id": capture["id"], "gross_amount": capture["amount"]}
        ],
        "reason": "MERCHANDISE_OR_SERVICE_NOT_RECEIVED",
        "status": "OPEN",
        "dispute_amount": money(value, capture["amount"]["currency_code"]),
        "dispute_life_cycle_stage": "INQUIRY",
        "dispute_channel": "INTERNAL",
    }
    stub.store.disputes[dispute["dispute_id"]] = dispute
    stub.store.save()
    stub.webhooks.dispute_event("CUSTOMER.DISPUTE.CREATED", dispute, stub.faults.webhook_copies)
    stub.notifications.case(capture, dispute)
    return web.json_response({"id": dispute["dispute_id"]})


async def resolve_dispute(request: web.Request) -> web.Response:
    """POST /control/disputes/ID/resolve {"outcome"}: RESOLVED_BUYER_FAVOUR, RESOLVED_SELLER_FAVOUR and so on.

    Without an outcome it only goes to its next stage. No money moves: that is /control/captures/ID/reverse.
    """
    stub = request.app[STUB]
    dispute = stub.store.disputes.get(request.match_info["dispute_id"])
    if dispute is None:
        raise web.HTTPNotFound(text="there is no such dispute")
    outcome, dispute["update_time"] = (await _wanted(request)).get("outcome"), utc_now()
    if outcome:
        dispute |= {"status": "RESOLVED", "dispute_outcome": {"outcome_code": outcome}}
    else:
        dispute |= {"status": "UNDER_REVIEW", "dispute_life_cycle_stage": "CHARGEBACK"}
    stub.store.disputes[dispute["dispute_id"]] = dispute
    stub.store.save()
    event = "CUSTOMER.DISPUTE." + ("RESOLVED" if outcome else "UPDATED")
    stub.webhooks.dispute_event(event, dispute, stub.faults.webhook_copies)
    return web.json_response(dispute)


async def move(request: web.Request) -> web.Response:
    """POST /control/movements {"code", "value", "currency"}: such as T0400 (to the bank) or T0106 (a dispute's fee)."""
    stub, wanted, transaction_id = request.app[STUB], await request.json(), new_id()
    stub.store.move(
        transaction_id, wanted["code"], wanted.get("currency", "USD"), Decimal(str(wanted["value"])), Decimal(0),
        reference_id=wanted.get("reference_id", ""),
    )  # fmt: skip
    stub.store.save()
    return web.json_response({"id": transaction_id})


async def _wanted(request: web.Request) -> dict[str, Any]:
    return await request.json() if request.can_read_body else {}


def _control_order(request: web.Request) -> dict[str, Any]:
    order = request.app[STUB].store.orders.get(request.match_info["order_id"])
    if order is None:
        raise web.HTTPNotFound(text="there is no such order")
    return order


def _control_capture(request: web.Request) -> tuple[dict[str, Any], dict[str, Any]]:
    found = request.app[STUB].store.find_capture(request.match_info["capture_id"])
    if found is None:
        raise web.HTTPNotFound(text="there is no such capture")
    return found
