"""The older way to tell the merchant (IPN): a form, posted until an answer of 200, and vouched for when asked."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

import aiohttp

from ledger.paypal.stub.store import Store

logger = logging.getLogger(__name__)

RECEIVER = "merchant@stub.invalid"
_RETRY_AFTER_S = (0.5, 2, 10)
_TIMEOUT = aiohttp.ClientTimeout(total=10)
_PACIFIC = ZoneInfo("US/Pacific")


class Notifications:
    """`url` is where the merchant listens; empty: only what a payment button names is told."""

    def __init__(self, store: Store, url: str = "") -> None:
        self.url = url
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    def payment(self, capture: dict[str, Any], *, status: str, url: str = "") -> None:
        breakdown = capture.get("seller_receivable_breakdown", {})
        fields = {
            "txn_type": "web_accept",
            "txn_id": capture["id"],
            "payment_status": status,
            "mc_gross": capture["amount"]["value"],
            "mc_fee": breakdown.get("paypal_fee", {}).get("value", ""),
        }
        if status == "Pending":
            fields["pending_reason"] = "paymentreview"
        self._tell(fields | _common(capture), url)

    def undoing(self, capture: dict[str, Any], refund: dict[str, Any], *, status: str, txn_id: str) -> None:
        """Refunded, Reversed or Canceled_Reversal of a payment."""
        sign = 1 if status == "Canceled_Reversal" else -1
        fields = {
            "txn_id": txn_id,
            "parent_txn_id": capture["id"],
            "payment_status": status,
            "reason_code": "refund" if status == "Refunded" else "chargeback",
            "mc_gross": f"{sign * Decimal(refund['amount']['value'])}",
            "mc_fee": f"{sign * Decimal(refund['fee_back'])}",
        }
        self._tell(fields | _common(capture), "")

    def case(self, capture: dict[str, Any], dispute: dict[str, Any]) -> None:
        fields = {
            "txn_type": "new_case",
            "txn_id": capture["id"],
            "case_id": dispute["dispute_id"],
            "case_type": "dispute",
            "reason_code": "non_receipt",
        }
        common = _common(capture)
        common.pop("mc_currency")
        self._tell(fields | common, "")

    def knows(self, body: bytes) -> bool:
        """Whether these are bytes that were sent."""
        return hashlib.sha256(body).hexdigest() in self._store.notifications

    def make(self, fields: dict[str, str]) -> bytes:
        """A notification with these fields, which will be vouched for."""
        charset = fields.get("charset", "utf-8")
        body = urlencode(fields, encoding=charset).encode("ascii")
        self._store.notifications.append(hashlib.sha256(body).hexdigest())
        self._store.save()
        return body

    def _tell(self, fields: dict[str, str], url: str) -> None:
        if not (url or self.url):
            return
        task = asyncio.create_task(self._deliver(url or self.url, self.make(fields)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, url: str, body: bytes) -> None:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            for wait_s in (*_RETRY_AFTER_S, None):
                try:
                    async with session.post(url, data=body, headers=headers) as answer:
                        if answer.status == 200:
                            return
                        logger.info("notification answered %s", answer.status)
                except (aiohttp.ClientError, TimeoutError) as error:
                    logger.info("notification not delivered: %s", error)
                if wait_s is not None:
                    await asyncio.sleep(wait_s)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _common(capture: dict[str, Any]) -> dict[str, str]:
    now = datetime.fromisoformat(capture["create_time"]).astimezone(UTC).astimezone(_PACIFIC)
    return {
        "business": RECEIVER,
        "receiver_email": RECEIVER,
        "receiver_id": "STUBMERCHANT1",
        "mc_currency": capture["amount"]["currency_code"],
        "invoice": capture["invoice_id"],
        "custom": capture["custom_id"],
        "payment_date": now.strftime("%H:%M:%S %b %d, %Y ") + ("PDT" if now.dst() else "PST"),
        "charset": "utf-8",
        "notify_version": "3.9",
    }
