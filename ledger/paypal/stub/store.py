"""The stub's memory: orders and the answers given to request ids, in one file that outlives the process."""

from __future__ import annotations

import json
import os
import secrets
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

_ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
# What a sale costs the merchant: 3.49 % and a fixed amount.
_FEE_RATE = Decimal("0.0349")
_FEE_FIXED = Decimal("0.49")


def new_id() -> str:
    """17 characters, as PayPal's ids have."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(17))


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def fee_of(gross: Decimal) -> Decimal:
    """Never the whole sale: small ones cost their last cent at most."""
    fee = (gross * _FEE_RATE + _FEE_FIXED).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return min(fee, gross - Decimal("0.01"))


class Store:
    """`orders` by id; `answers` by operation and PayPal-Request-Id. `save()` before you answer."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / "state.json" if folder else None
        self.orders: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        if self._file and self._file.exists():
            kept = json.loads(self._file.read_text())
            self.orders, self.answers = kept["orders"], kept["answers"]

    def save(self) -> None:
        """Whole or not at all: a killed process leaves the last good file."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps({"orders": self.orders, "answers": self.answers}))
        os.replace(draft, self._file)

    def add_capture(self, order: dict[str, Any], *, pending: bool) -> dict[str, Any]:
        """Takes the money of an approved order: COMPLETED with its fee, or PENDING without."""
        (unit,) = order["purchase_units"]
        capture: dict[str, Any] = {
            "id": new_id(),
            "status": "PENDING" if pending else "COMPLETED",
            "amount": {name: unit["amount"][name] for name in ("currency_code", "value")},
            "final_capture": True,
            "custom_id": unit.get("custom_id", ""),
            "invoice_id": unit.get("invoice_id", ""),
            "create_time": utc_now(),
            "update_time": utc_now(),
            "links": [],
        }
        if pending:
            capture["status_details"] = {"reason": "PENDING_REVIEW"}
        else:
            self._add_breakdown(capture)
        unit["payments"] = {"captures": [capture]}
        order["status"] = "COMPLETED"
        order["update_time"] = utc_now()
        return capture

    def complete_capture(self, order: dict[str, Any], *, declined: bool = False) -> dict[str, Any]:
        """Decides a pending capture."""
        capture: dict[str, Any] = order["purchase_units"][0]["payments"]["captures"][0]
        capture["status"] = "DECLINED" if declined else "COMPLETED"
        capture.pop("status_details", None)
        capture["update_time"] = utc_now()
        if not declined:
            self._add_breakdown(capture)
        return capture

    def _add_breakdown(self, capture: dict[str, Any]) -> None:
        currency, gross = capture["amount"]["currency_code"], Decimal(capture["amount"]["value"])
        fee = fee_of(gross)
        capture["seller_receivable_breakdown"] = {
            "gross_amount": {"currency_code": currency, "value": f"{gross:.2f}"},
            "paypal_fee": {"currency_code": currency, "value": f"{fee:.2f}"},
            "net_amount": {"currency_code": currency, "value": f"{gross - fee:.2f}"},
        }
