"""The stub's addresses."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from ledger.paypal.stub import api, pages
from ledger.paypal.stub.state import STUB, Stub
from ledger.paypal.stub.store import Store
from ledger.paypal.stub.webhooks import Webhooks


def make_app(*, state: Path | None = None, webhook_url: str = "") -> web.Application:
    """`state` is the folder to remember in; None: only while it runs."""
    app = web.Application()
    app[STUB] = Stub(store=Store(state), webhooks=Webhooks(webhook_url))
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.post("/v1/oauth2/token", api.token),
            web.post("/v2/checkout/orders", api.create_order),
            web.get("/v2/checkout/orders/{order_id}", api.get_order),
            web.post("/v2/checkout/orders/{order_id}/capture", api.capture_order),
            web.get("/checkoutnow", pages.checkout_page),
            web.post("/checkoutnow", pages.checkout_decision),
            web.post("/control/faults", pages.set_faults),
            web.delete("/control/faults", pages.clear_faults),
            web.put("/control/webhook", pages.set_webhook),
            web.post("/control/orders/{order_id}/approve", pages.approve),
            web.post("/control/orders/{order_id}/complete", pages.complete),
        ]
    )
    app.on_shutdown.append(_stop)
    return app


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _stop(app: web.Application) -> None:
    await app[STUB].webhooks.stop()
