"""Tells the merchant, as PayPal does: signed, repeated until a 2xx, more than once and out of order if asked to."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import uuid
from typing import Any

import aiohttp

from ledger.paypal.stub.signing import signer
from ledger.paypal.stub.store import new_id, utc_now

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = (0.5, 2, 5, 10, 30)
_TIMEOUT = aiohttp.ClientTimeout(total=10)
CERTIFICATES_PATH = "/v1/notifications/certs/"


class Webhooks:
    """`url` is where the merchant listens; empty: nobody is told. While `held`, events wait for `release`.

    `base` is the stub's own address, for the links in events and for the certificate's address.
    """

    def __init__(self, url: str = "", webhook_id: str = "STUB-WEBHOOK") -> None:
        self.url = url
        self.webhook_id = webhook_id
        self.base = ""
        self.held = False
        self._waiting: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def order_event(self, event_type: str, order: dict[str, Any], copies: int) -> None:
        self._send(event_type, "checkout-order", order, copies)

    def capture_event(self, order: dict[str, Any], capture: dict[str, Any], copies: int) -> None:
        related = {"supplementary_data": {"related_ids": {"order_id": order["id"]}}}
        kind = "DENIED" if capture["status"] == "DECLINED" else capture["status"]
        self._send(f"PAYMENT.CAPTURE.{kind}", "capture", capture | related, copies)

    def refund_event(self, event_type: str, refund: dict[str, Any], copies: int) -> None:
        """`refund` as the API shows it."""
        self._send(event_type, "refund", refund, copies)

    def dispute_event(self, event_type: str, dispute: dict[str, Any], copies: int) -> None:
        self._send(event_type, "dispute", dispute, copies)

    def signed(self, body: bytes) -> dict[str, str]:
        """The headers that go with a body."""
        transmission_id, transmission_time = str(uuid.uuid4()), utc_now()
        return {
            "Content-Type": "application/json",
            "Paypal-Transmission-Id": transmission_id,
            "Paypal-Transmission-Time": transmission_time,
            "Paypal-Transmission-Sig": signer().sign(
                transmission_id=transmission_id,
                transmission_time=transmission_time,
                webhook_id=self.webhook_id,
                body=body,
            ),
            "Paypal-Auth-Algo": "SHA256withRSA",
            "Paypal-Cert-Url": self.base + CERTIFICATES_PATH + signer().certificate_id,
        }

    def release(self, order: str) -> int:
        """Sends what waits: `sent` order, `reversed` or `shuffled`. Returns how many."""
        bodies, self._waiting = self._waiting, []
        if order == "reversed":
            bodies.reverse()
        elif order == "shuffled":
            random.shuffle(bodies)
        for body in bodies:
            self._start(body)
        return len(bodies)

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
            if self.held:
                self._waiting.append(body)
            else:
                self._start(body)

    def _start(self, body: bytes) -> None:
        task = asyncio.create_task(self._deliver(body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, body: bytes) -> None:
        headers = self.signed(body)
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
