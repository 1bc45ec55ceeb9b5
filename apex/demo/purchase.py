"""Buys credits as a customer would: order through the API, approval on the payment provider's page."""

from __future__ import annotations

import re
import time
import uuid
from typing import Any

import requests

_TIMEOUT_S = 10
_PATIENCE_S = 60


class PurchaseFailed(RuntimeError):
    """No credits; the message says at which step."""


def buy_credits(*, web: str, api_key: str, amount: str) -> str:
    """Returns the balance afterwards as text. Blocks until the ledger has booked the money."""
    with requests.Session() as session:
        api = {"Authorization": f"Bearer {api_key}"}
        top_up = _json(
            session.post(
                f"{web}/v1/topups",
                json={"amount": {"amount": amount, "currency": "USD"}},
                headers=api | {"Idempotency-Key": str(uuid.uuid4())},
                timeout=_TIMEOUT_S,
            )
        )
        approve(session, top_up["approve_url"])
        deadline = time.monotonic() + _PATIENCE_S
        while top_up["state"] != "settled":
            if time.monotonic() > deadline or top_up["failure"]:
                raise PurchaseFailed(
                    f"the purchase stopped at {top_up['state']!r} {top_up['failure']}".rstrip()
                )
            time.sleep(0.1)
            top_up = _json(session.get(f"{web}/v1/topups/{top_up['id']}", headers=api, timeout=_TIMEOUT_S))
        balance = _json(session.get(f"{web}/v1/balance", headers=api, timeout=_TIMEOUT_S))["available"]
        return f"{balance['amount']} {balance['currency']}"


def approve(session: requests.Session, url: str) -> None:
    """Presses "Approve" on the page of the payer. The browser would then be sent back to the portal."""
    page = session.get(url, timeout=_TIMEOUT_S)
    button = re.search(r'<button name="([^"]+)" value="(approve)"', page.text)
    if page.status_code != 200 or button is None:
        raise PurchaseFailed(f"the approval page answered {page.status_code} and has no button to approve")
    answer = session.post(url, data={button[1]: button[2]}, timeout=_TIMEOUT_S, allow_redirects=False)
    if answer.status_code >= 400:
        raise PurchaseFailed(f"the approval was answered with {answer.status_code}")


def _json(response: requests.Response) -> dict[str, Any]:
    if response.status_code >= 400:
        raise PurchaseFailed(
            f"{response.request.path_url} answered {response.status_code}: {response.text[:200]}"
        )
    return response.json()
