"""What the caller reads when its money does not allow a request."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import orjson
import psycopg

from kernel_steer.admission import Refusal

_INSUFFICIENT_FUNDS = "AX001"  # ledger/sql/holds.sql
_OVER_BUDGET = "AB001"  # brokerage/sql/budgets.sql
_RETRY_AFTER_S = 2
# How soon answers that are under way may have ended and given back what they do not need.
_HELD_RETRY_AFTER_S = 5


def of_hold(error: psycopg.Error, required: Decimal, currency: str) -> Refusal | None:
    """The refusal that an error of budget_hold_create means; None for any other error."""
    figures = orjson.loads(error.diag.message_detail or "{}") if error.sqlstate else {}
    if error.sqlstate == _INSUFFICIENT_FUNDS:
        return _not_enough_credit(figures, required, currency)
    if error.sqlstate == _OVER_BUDGET:
        return _over_budget(figures, required, currency)
    return None


def _not_enough_credit(figures: dict[str, str], required: Decimal, currency: str) -> Refusal:
    message = f"Not enough credit: this request can cost up to {_money(required)} {currency}"
    if {"available", "shortfall"} <= figures.keys():
        message += f", {_money(figures['available'])} is available, {_money(figures['shortfall'])} is missing"
    return Refusal(402, "insufficient_quota", f"{message}. Buy credit, or ask for fewer max_tokens.")


def _over_budget(figures: dict[str, str], required: Decimal, currency: str) -> Refusal:
    owner = {
        "key": "this API key",
        "project": f"the project “{figures['project']}”",
        "customer": "your account",
    }[figures["of"]]
    amount, spent, held = (Decimal(figures[name]) for name in ("amount", "spent", "held"))
    message = (
        f"The {figures['period']} budget of {owner} does not allow this request: it can cost up to"
        f" {_money(required)} {currency}; of {_money(amount)} {currency}, {_money(spent)} is spent and"
        f" {_money(held)} is held for answers under way."
    )
    if spent + required <= amount:
        message += " Try again when they have ended, or ask for fewer max_tokens."
        return _budget_refusal(message, _HELD_RETRY_AFTER_S)
    ends_at = datetime.fromtimestamp(int(figures["ends_at"]), UTC).astimezone(ZoneInfo(figures["time_zone"]))
    message += f" The budget begins anew at {ends_at.isoformat()} ({figures['time_zone']})."
    if required > amount:
        message += " This request is too large for it even then: ask for fewer max_tokens."
    return _budget_refusal(message, max(1, int(figures["ends_in_s"])))


def _budget_refusal(message: str, retry_after_s: int) -> Refusal:
    return Refusal(429, "budget_exceeded", message, retry_after_s=retry_after_s)


def unavailable() -> Refusal:
    return Refusal(
        503,
        "service_unavailable",
        "Credit cannot be reserved at the moment. Nothing was charged; try again.",
        retry_after_s=_RETRY_AFTER_S,
    )


def _money(amount: Decimal | str) -> str:
    return f"{Decimal(amount).normalize():f}"
