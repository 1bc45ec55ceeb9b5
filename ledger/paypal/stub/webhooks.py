"""Tells the merchant, as PayPal does: repeats until a 2xx, more than once if asked to. Unsigned."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from typing import Any

import aiohttp

from ledger.paypal.stub.store import new_id, utc_now

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = (0.5, 2, 5, 10, 30)
_TIMEOUT = aiohttp.ClientTimeout(total=10)


class Webhooks:
    """`url` is where the merchant listens; empty: nobody is told."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self._tasks: set[asyncio.Task[None]] = set()

    def order_event(self, event_type: str, order: dict[str, Any], copies: int) -> None:
        self._send(event_type, "checkout-order", order, copies)

    def capture_event(self, order: dict[str, Any], capture: dict[str, Any], copies: int) -> None:
        related = {"supplementary_data": {"related_ids": {"order_id": order["id"]}}}
        self._send(f"PAYMENT.CAPTURE.{capture['status']}", "capture", capture | related, copies)

    def _send(self, event_type: str, resource_type: str, resource: dict[str, Any], copies: int) -> None:
        if not self.url:
            return
        event = {
            "id": f"WH-{new_id()}",
            "event_version": "1.0",
            "create_time": utc_now(),
            "resource_type": resource_type,
            "event_type": event_type,
            "resource": resource,
        }
        body = json.dumps(event).encode()
        for _ in range(copies):
            task = asyncio.create_task(self._deliver(body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, body: bytes) -> None:
        headers = {
            "Content-Type": "application/json",
            "Paypal-Transmission-Id": str(uuid.uuid4()),
            "Paypal-Transmission-Time": utc_now(),
        }
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            for wait_s in (*_RETRY_AFTER_S, None):
                try:
                    async with session.post(self.url, data=body, headers=headers) as answer:
                        if answer.status < 300:
                            return
                        logger.info("webhook answered %s", answer.status)
                except (aiohttp.ClientError, TimeoutError) as error:
                    logger.info("webhook not delivered: %s", error)
                if wait_s is not None:
                    await asyncio.sleep(wait_s)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
