"""The stub's memory: what happened and the answers given to request ids, in one file that outlives the process."""

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
WHOLE_ONLY = frozenset({"HUF", "JPY", "TWD"})
_KEPT = ("orders", "answers", "refunds", "disputes", "movements", "notifications")


def new_id() -> str:
    """17 characters, as PayPal's ids have."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(17))


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def fee_of(gross: Decimal) -> Decimal:
    """Never the whole sale: small ones cost their last cent at most."""
    fee = (gross * _FEE_RATE + _FEE_FIXED).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return min(fee, gross - Decimal("0.01"))


def money(value: Decimal, currency: str) -> dict[str, str]:
    """As PayPal writes it."""
    return {"currency_code": currency, "value": f"{value:.{0 if currency in WHOLE_ONLY else 2}f}"}


class Store:
    """`orders`, `refunds` (and reversals) and `disputes` by id; `answers` by operation and PayPal-Request-Id;
    `movements` as the transaction search lists them; `notifications` that were sent. `save()` before you answer.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / "state.json" if folder else None
        self.orders: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.refunds: dict[str, dict[str, Any]] = {}
        self.disputes: dict[str, dict[str, Any]] = {}
        self.movements: list[dict[str, Any]] = []
        self.notifications: list[str] = []
        # The merchant's own currency and the rate into it; PayPal then changes every other one on receipt.
        self.home: tuple[str, Decimal] | None = None
        if self._file and self._file.exists():
            kept = json.loads(self._file.read_text())
            for name in _KEPT:
                setattr(self, name, kept.get(name, getattr(self, name)))

    def save(self) -> None:
        """Whole or not at all: a killed process leaves the last good file."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps({name: getattr(self, name) for name in _KEPT}))
        os.replace(draft, self._file)

    def add_capture(self, order: dict[str, Any], *, pending: bool, code: str = "T0006") -> dict[str, Any]:
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
            self._complete(capture, code)
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
            self._complete(capture, "T0006")
        return capture

    def find_capture(self, capture_id: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The order and the capture of that id."""
        for order in self.orders.values():
            for capture in order["purchase_units"][0].get("payments", {}).get("captures", []):
                if capture["id"] == capture_id:
                    return order, capture
        return None

    def taken_of(self, capture_id: str) -> Decimal:
        """What went back of a capture, pending refunds too."""
        return sum(
            (
                Decimal(refund["amount"]["value"])
                for refund in self.refunds.values()
                if refund["capture_id"] == capture_id and refund["status"] in {"COMPLETED", "PENDING"}
                and not refund.get("cancelled")
            ),
            Decimal(0),
        )  # fmt: skip

    def add_refund(
        self, order: dict[str, Any], capture: dict[str, Any], value: Decimal, *, fee_back: Decimal,
        code: str = "T1107", pending: bool = False, custom_id: str = "", note: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """Sends money back, or (T1201, T1106) has it taken: PayPal shows both as refunds."""
        currency = capture["amount"]["currency_code"]
        refund: dict[str, Any] = {
            "id": new_id(),
            "capture_id": capture["id"],
            "status": "PENDING" if pending else "COMPLETED",
            "amount": money(value, currency),
            "custom_id": custom_id,
            "note_to_payer": note,
            "code": code,
            "fee_back": str(fee_back),
            "create_time": utc_now(),
            "update_time": utc_now(),
        }
        self.refunds[refund["id"]] = refund
        order["purchase_units"][0]["payments"].setdefault("refunds", []).append({"id": refund["id"]})
        if not pending:
            self.complete_refund(refund)
        return refund

    def complete_refund(self, refund: dict[str, Any], *, failed: bool = False) -> None:
        """Decides a pending refund, or takes a completed one back."""
        _, capture = self.find_capture(refund["capture_id"]) or ({}, {})
        value, fee = Decimal(refund["amount"]["value"]), Decimal(refund["fee_back"])
        moved = refund.get("moved", False)
        refund["status"] = "FAILED" if failed else "COMPLETED"
        refund["update_time"] = utc_now()
        if moved == failed:
            sign = 1 if failed else -1
            self.move(
                refund["id"], refund["code"] if not failed else "T1119", refund["amount"]["currency_code"],
                sign * value, -sign * fee, reference_id=capture["id"],
            )  # fmt: skip
            home = self.convert(refund["id"], refund["amount"]["currency_code"], sign * (value - fee))
            if home is not None:
                refund["home"] = home
            refund["moved"] = not failed
        left = Decimal(capture["amount"]["value"]) - self.taken_of(capture["id"])
        capture["status"] = (
            "COMPLETED"
            if left == Decimal(capture["amount"]["value"])
            else "PARTIALLY_REFUNDED"
            if left
            else "REFUNDED"
        )

    def move(
        self, transaction_id: str, code: str, currency: str, gross: Decimal, fee: Decimal,
        *, reference_id: str = "", invoice_id: str = "",
    ) -> None:  # fmt: skip
        """A line of the transaction search: above zero came to the merchant."""
        self.movements.append(
            {
                "transaction_id": transaction_id,
                "code": code,
                "currency": currency,
                "gross": str(gross),
                "fee": str(fee),
                "reference_id": reference_id,
                "invoice_id": invoice_id,
                "at": utc_now(),
            }
        )

    def _complete(self, capture: dict[str, Any], code: str) -> None:
        currency, gross = capture["amount"]["currency_code"], Decimal(capture["amount"]["value"])
        fee = fee_of(gross)
        capture["seller_receivable_breakdown"] = {
            "gross_amount": {"currency_code": currency, "value": f"{gross:.2f}"},
            "paypal_fee": {"currency_code": currency, "value": f"{fee:.2f}"},
            "net_amount": {"currency_code": currency, "value": f"{gross - fee:.2f}"},
        }
        self.move(capture["id"], code, currency, gross, -fee, invoice_id=capture["invoice_id"])
        if (home := self.convert(capture["id"], currency, gross - fee)) is not None:
            capture["seller_receivable_breakdown"] |= {
                "receivable_amount": home,
                "exchange_rate": {
                    "source_currency": currency, "target_currency": home["currency_code"],
                    "value": str(self.home[1] if self.home else ""),
                },
            }  # fmt: skip

    def convert(self, transaction_id: str, currency: str, value: Decimal) -> dict[str, str] | None:
        """Changes money that came (or, below zero, went) into the home currency; what it is there."""
        if self.home is None or self.home[0] == currency:
            return None
        home, rate = self.home
        changed = (value * rate).quantize(Decimal("0.01"), ROUND_HALF_UP)
        self.move(new_id(), "T0200", currency, -value, Decimal(0), reference_id=transaction_id)
        self.move(new_id(), "T0200", home, changed, Decimal(0), reference_id=transaction_id)
        return money(abs(changed), home)
