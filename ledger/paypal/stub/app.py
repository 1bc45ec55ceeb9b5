"""The stub's addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from ledger.paypal.stub import aftersale, api, control, pages
from ledger.paypal.stub.notifications import Notifications
from ledger.paypal.stub.signing import signer
from ledger.paypal.stub.state import STUB, Stub
from ledger.paypal.stub.store import Store
from ledger.paypal.stub.webhooks import CERTIFICATES_PATH, Webhooks


def make_app(
    *, state: Path | None = None, webhook_url: str = "", webhook_id: str = "STUB-WEBHOOK", ipn_url: str = ""
) -> web.Application:
    """`state` is the folder to remember in, and where `ca.pem` goes; None: only while it runs."""
    app = web.Application(middlewares=[_know_own_address])
    store = Store(state)
    app[STUB] = Stub(
        store=store, webhooks=Webhooks(webhook_url, webhook_id), notifications=Notifications(store, ipn_url)
    )
    if state is not None:
        signer().write_authority(state)
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.post("/v1/oauth2/token", api.token),
            web.post("/v2/checkout/orders", api.create_order),
            web.get("/v2/checkout/orders/{order_id}", api.get_order),
            web.post("/v2/checkout/orders/{order_id}/capture", api.capture_order),
            web.post("/v2/payments/captures/{capture_id}/refund", aftersale.refund_capture),
            web.get("/v2/payments/refunds/{refund_id}", aftersale.get_refund),
            web.get("/v1/customer/disputes/{dispute_id}", aftersale.get_dispute),
            web.get("/v1/reporting/transactions", aftersale.search),
            web.get("/v1/reporting/balances", aftersale.balances),
            web.post("/v1/notifications/verify-webhook-signature", aftersale.verify),
            web.get(f"{CERTIFICATES_PATH}{{certificate_id}}", aftersale.certificate),
            web.get("/checkoutnow", pages.checkout_page),
            web.post("/checkoutnow", pages.checkout_decision),
            web.get("/cgi-bin/webscr", pages.button_page),
            web.post("/cgi-bin/webscr", pages.button_decision),
            web.post("/control/faults", control.set_faults),
            web.delete("/control/faults", control.clear_faults),
            web.put("/control/webhook", control.set_webhook),
            web.post("/control/webhook/release", control.release_webhooks),
            web.put("/control/ipn", control.set_notifications),
            web.post("/control/orders/{order_id}/approve", control.approve),
            web.post("/control/orders/{order_id}/complete", control.complete),
            web.post("/control/refunds/{refund_id}/complete", control.complete_refund),
            web.post("/control/captures/{capture_id}/reverse", control.reverse),
            web.post("/control/reversals/{refund_id}/cancel", control.cancel_reversal),
            web.post("/control/captures/{capture_id}/dispute", control.open_dispute),
            web.post("/control/disputes/{dispute_id}/resolve", control.resolve_dispute),
            web.post("/control/movements", control.move),
        ]
    )
    app.on_shutdown.append(_stop)
    return app


@web.middleware
async def _know_own_address(request: web.Request, handler: Any) -> web.StreamResponse:
    """Links in events lead back here as the merchant calls us, which may differ from how the payer's browser does."""
    if request.path.startswith(("/v1/", "/v2/")):
        request.app[STUB].webhooks.base = f"{request.scheme}://{request.host}"
    answer: web.StreamResponse = await handler(request)
    return answer


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _stop(app: web.Application) -> None:
    await app[STUB].webhooks.stop()
    await app[STUB].notifications.stop()
