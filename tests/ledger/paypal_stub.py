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
    """`url` is its address; the methods are what a payer or a saboteur does."""

    def __init__(self, url: str, stub: Stub) -> None:
        self.url = url
        self._stub = stub

    def approve(self, order_id: str | None) -> None:
        requests.post(f"{self.url}/control/orders/{order_id}/approve", timeout=5).raise_for_status()

    def complete(self, order_id: str | None, *, declined: bool = False) -> None:
        url = f"{self.url}/control/orders/{order_id}/complete?declined={int(declined)}"
        requests.post(url, timeout=5).raise_for_status()

    def break_(self, operation: str, kind: str, times: int = 1) -> None:
        wanted = {"operation": operation, "kind": kind, "times": times}
        requests.post(f"{self.url}/control/faults", json=wanted, timeout=5).raise_for_status()

    @property
    def orders(self) -> dict[str, dict[str, Any]]:
        return self._stub.store.orders

    def captures(self) -> list[dict[str, Any]]:
        """Every capture there is: money that PayPal took from somebody."""
        units = [order["purchase_units"][0] for order in self.orders.values()]
        return [capture for unit in units for capture in unit.get("payments", {}).get("captures", [])]


@contextmanager
def running_stub(state: Path | None = None, webhook_url: str = "", port: int = 0) -> Iterator[RunningStub]:
    app = make_app(state=state, webhook_url=webhook_url)
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
