"""The payer's side: the pages where a person agrees or not, and PayPal's word for a notification."""

from __future__ import annotations

import html
from typing import Any
from urllib.parse import urlencode, urlsplit

from aiohttp import web

from ledger.paypal.stub.state import STUB, Stub
from ledger.paypal.stub.store import new_id, utc_now

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>PayPal (stand-in)</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 26rem; margin: 4rem auto; padding: 0 1rem }}
button {{ font: inherit; padding: .6rem 1.2rem; margin-right: .5rem }}
</style></head>
<body><main><h1>PayPal (stand-in)</h1>
<p>This page stands in for PayPal. No real money moves.</p>
{content}
</main></body></html>"""
_FORM = """<p>Pay <strong>{amount} {currency}</strong> for {description}?</p>
<form method="post"><button name="decision" value="approve">Approve</button>
<button name="decision" value="cancel">Cancel</button></form>"""


async def checkout_page(request: web.Request) -> web.Response:
    order = _order_of(request)
    if order is None:
        return _page("<p>There is no such order.</p>", status=404)
    if order["status"] not in {"CREATED", "PAYER_ACTION_REQUIRED"}:
        return _page("<p>This order is decided already.</p>")
    (unit,) = order["purchase_units"]
    amount = unit["amount"]
    return _page(
        _FORM.format(
            amount=html.escape(amount["value"]),
            currency=html.escape(amount["currency_code"]),
            description=html.escape(str(unit.get("description") or "this purchase")),
        )
    )


async def checkout_decision(request: web.Request) -> web.StreamResponse:
    order = _order_of(request)
    if order is None:
        return _page("<p>There is no such order.</p>", status=404)
    form = await request.post()
    approved = form.get("decision") == "approve"
    if approved:
        approve_order(request.app[STUB], order)
    address = order["stub_addresses"]["return_url" if approved else "cancel_url"]
    if urlsplit(address).scheme not in {"http", "https"}:
        return _page("<p>Done. The shop gave no address to go back to.</p>")
    query = {"token": order["id"]} | ({"PayerID": new_id()[:13]} if approved else {})
    glue = "&" if urlsplit(address).query else "?"
    raise web.HTTPSeeOther(address + glue + urlencode(query))


async def button_page(request: web.Request) -> web.Response:
    """GET /cgi-bin/webscr?cmd=_xclick...: an older payment button."""
    query = request.query
    if query.get("cmd") != "_xclick" or not query.get("amount") or not query.get("business"):
        return _page("<p>This button does not work.</p>", status=400)
    return _page(
        _FORM.format(
            amount=html.escape(query["amount"]),
            currency=html.escape(query.get("currency_code", "USD")),
            description=html.escape(query.get("item_name", "this purchase")),
        )
    )


async def button_decision(request: web.Request) -> web.StreamResponse:
    """POST /cgi-bin/webscr: the payer's decision, or the merchant's question whether a notification is ours."""
    stub, raw = request.app[STUB], await request.read()
    prefix = b"cmd=_notify-validate&"
    if raw.startswith(prefix):
        if stub.faults.take("postback", "error"):
            return web.Response(status=500)
        known = stub.notifications.knows(raw.removeprefix(prefix))
        return web.Response(text="VERIFIED" if known else "INVALID")
    query, form = request.query, await request.post()
    if form.get("decision") != "approve":
        raise web.HTTPSeeOther(query.get("cancel_return", "/"))
    amount = {"currency_code": query.get("currency_code", "USD"), "value": query["amount"]}
    order: dict[str, Any] = {
        "id": new_id(),
        "status": "APPROVED",
        "purchase_units": [
            {"amount": amount, "custom_id": query.get("custom", ""), "invoice_id": query.get("invoice", "")}
        ],
        "stub_addresses": {},
    }
    stub.store.orders[order["id"]] = order
    pending = stub.faults.take("capture", "pending")
    capture = stub.store.add_capture(order, pending=pending, code="T0007")
    stub.store.save()
    stub.notifications.payment(
        capture, status="Pending" if pending else "Completed", url=query.get("notify_url", "")
    )
    raise web.HTTPSeeOther(query.get("return", "/"))


def approve_order(stub: Stub, order: dict[str, Any]) -> None:
    """The payer agrees."""
    if order["status"] in {"CREATED", "PAYER_ACTION_REQUIRED"}:
        order["status"] = "APPROVED"
        order["payer"] = {"payer_id": new_id()[:13], "email_address": "payer@example.com"}
        order["update_time"] = utc_now()
        stub.store.save()
        stub.webhooks.order_event("CHECKOUT.ORDER.APPROVED", _shown(order), stub.faults.webhook_copies)


def _shown(order: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in order.items() if name != "stub_addresses"}


def _order_of(request: web.Request) -> dict[str, Any] | None:
    return request.app[STUB].store.orders.get(request.query.get("token", ""))


def _page(content: str, status: int = 200) -> web.Response:
    return web.Response(text=_PAGE.format(content=content), content_type="text/html", status=status)
