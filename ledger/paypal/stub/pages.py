"""The payer's side: the page where a person agrees or not, and the control endpoints that play a person."""

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
        _approve(request.app[STUB], order)
    address = order["stub_addresses"]["return_url" if approved else "cancel_url"]
    if urlsplit(address).scheme not in {"http", "https"}:
        return _page("<p>Done. The shop gave no address to go back to.</p>")
    query = {"token": order["id"]} | ({"PayerID": new_id()[:13]} if approved else {})
    glue = "&" if urlsplit(address).query else "?"
    raise web.HTTPSeeOther(address + glue + urlencode(query))


async def approve(request: web.Request) -> web.Response:
    """POST /control/orders/ID/approve: the payer agrees, without a browser."""
    order = _control_order(request)
    _approve(request.app[STUB], order)
    return web.json_response({"status": order["status"]})


async def complete(request: web.Request) -> web.Response:
    """POST /control/orders/ID/complete: a pending capture is decided; ?declined=1 against the merchant."""
    stub, order = request.app[STUB], _control_order(request)
    if not order["purchase_units"][0].get("payments"):
        raise web.HTTPConflict(text="nothing is captured yet")
    capture = stub.store.complete_capture(order, declined=request.query.get("declined") == "1")
    stub.store.save()
    stub.webhooks.capture_event(order, capture, stub.faults.webhook_copies)
    return web.json_response({"status": capture["status"]})


async def set_faults(request: web.Request) -> web.Response:
    """POST /control/faults {"operation", "kind", "times"} and, optional, "delay_s", "webhook_copies"."""
    stub, wanted = request.app[STUB], await request.json()
    stub.faults.delay_s = float(wanted.get("delay_s", stub.faults.delay_s))
    stub.faults.webhook_copies = int(wanted.get("webhook_copies", stub.faults.webhook_copies))
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
    """PUT /control/webhook {"url"}: where events go; empty: nowhere."""
    request.app[STUB].webhooks.url = str((await request.json()).get("url", ""))
    return web.json_response({"url": request.app[STUB].webhooks.url})


def _approve(stub: Stub, order: dict[str, Any]) -> None:
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


def _control_order(request: web.Request) -> dict[str, Any]:
    order = request.app[STUB].store.orders.get(request.match_info["order_id"])
    if order is None:
        raise web.HTTPNotFound(text="there is no such order")
    return order


def _page(content: str, status: int = 200) -> web.Response:
    return web.Response(text=_PAGE.format(content=content), content_type="text/html", status=status)
