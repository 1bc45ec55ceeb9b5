"""The loopback PayPal in a thread of the test, on a port of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from aiohttp import web

from ledger.paypal.stub.app import make_app
from ledger.paypal.stub.state import STUB, Stub


class RunningStub:
    """`url` is its address; the methods are what a payer, a bank or a saboteur does."""

    def __init__(self, url: str, stub: Stub) -> None:
        self.url = url
        self._stub = stub
        stub.webhooks.base = url

    def approve(self, order_id: str | None) -> None:
        self._post(f"orders/{order_id}/approve")

    def complete(self, order_id: str | None, *, declined: bool = False) -> None:
        self._post(f"orders/{order_id}/complete?declined={int(declined)}")

    def reverse(self, capture_id: str, value: str | None = None) -> str:
        """The payer's bank takes money back; the id of that."""
        return self._post(f"captures/{capture_id}/reverse", {"value": value} if value else {})["id"]

    def cancel_reversal(self, reversal_id: str) -> str:
        return self._post(f"reversals/{reversal_id}/cancel")["id"]

    def dispute(self, capture_id: str, value: str | None = None) -> str:
        return self._post(f"captures/{capture_id}/dispute", {"value": value} if value else {})["id"]

    def resolve(self, dispute_id: str, outcome: str | None = None) -> None:
        self._post(f"disputes/{dispute_id}/resolve", {"outcome": outcome})

    def complete_refund(self, refund_id: str | None, *, failed: bool = False) -> None:
        self._post(f"refunds/{refund_id}/complete?failed={int(failed)}")

    def move(self, code: str, value: str, currency: str = "USD", reference_id: str = "") -> str:
        wanted = {"code": code, "value": value, "currency": currency, "reference_id": reference_id}
        return self._post("movements", wanted)["id"]

    def break_(self, operation: str, kind: str, times: int = 1, **more: Any) -> None:
        self._post("faults", {"operation": operation, "kind": kind, "times": times} | more)

    def set(self, **more: Any) -> None:
        self._post("faults", more)

    def refund_outside(self, capture_id: str, value: str) -> str:
        """Somebody refunds on PayPal's own pages; the id of the refund."""
        _, capture = self._stub.store.find_capture(capture_id) or ({}, {})
        amount = capture["amount"] | {"value": value}
        answer = requests.post(
            f"{self.url}/v2/payments/captures/{capture_id}/refund",
            json={"amount": amount}, headers=self.token(), timeout=5,
        )  # fmt: skip
        answer.raise_for_status()
        return answer.json()["id"]

    def token(self) -> dict[str, str]:
        answer = requests.post(
            f"{self.url}/v1/oauth2/token",
            data={"grant_type": "client_credentials"}, auth=("id", "secret"), timeout=5,
        )  # fmt: skip
        return {"Authorization": f"Bearer {answer.json()['access_token']}"}

    def signed(self, body: bytes) -> dict[str, str]:
        """Headers under which PayPal would send this body."""
        return self._stub.webhooks.signed(body)

    def notification(self, **fields: str) -> bytes:
        """A notification with these fields, which PayPal vouches for."""
        return self._stub.notifications.make(fields)

    @property
    def store(self) -> Any:
        return self._stub.store

    @property
    def orders(self) -> dict[str, dict[str, Any]]:
        return self._stub.store.orders

    def captures(self) -> list[dict[str, Any]]:
        """Every capture there is: money that PayPal took from somebody."""
        units = [order["purchase_units"][0] for order in self.orders.values()]
        return [capture for unit in units for capture in unit.get("payments", {}).get("captures", [])]

    def _post(self, path: str, wanted: dict[str, Any] | None = None) -> Any:
        answer = requests.post(f"{self.url}/control/{path}", json=wanted or {}, timeout=5)
        answer.raise_for_status()
        return answer.json()


@contextmanager
def running_stub(
    state: Path | None = None, webhook_url: str = "", port: int = 0, ipn_url: str = ""
) -> Iterator[RunningStub]:
    app = make_app(state=state, webhook_url=webhook_url, ipn_url=ipn_url)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        return int(runner.addresses[0][1])

    chosen = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield RunningStub(f"http://127.0.0.1:{chosen}", app[STUB])
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
