"""Every way in which the books can refuse. Each has its own SQLSTATE in ledger/sql."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal

import psycopg
from django.db import DatabaseError


class LedgerError(Exception):
    """The message says what was refused and why; it holds no secret."""


class InsufficientFunds(LedgerError):
    """AX001. The account would fall below its floor. Amounts are in the account's currency."""

    def __init__(self, message: str, *, available: Decimal, required: Decimal, shortfall: Decimal) -> None:
        super().__init__(message)
        self.available = available
        self.required = required
        self.shortfall = shortfall


class IdempotencyConflict(LedgerError):
    """AX002. The key was used for another request; `fields` are those that differ."""

    def __init__(self, message: str, *, fields: list[str]) -> None:
        super().__init__(message)
        self.fields = fields


class HoldNotOpen(LedgerError):
    """AX003. Captured, voided or expired already, or no such hold."""


class OverCapture(LedgerError):
    """AX004. More than the hold has."""


class PeriodClosed(LedgerError):
    """AX005. The journal is dated in a closed period."""


class BadPosting(LedgerError):
    """AX006. Unbalanced, one-legged, unknown account, foreign currency, malformed amount and the like."""


def _insufficient_funds(message: str, detail: str) -> LedgerError:
    figures = {name: Decimal(value) for name, value in json.loads(detail).items()}
    return InsufficientFunds(message, **figures)


def _conflict(message: str, detail: str) -> LedgerError:
    return IdempotencyConflict(message, fields=json.loads(detail))


_BY_SQLSTATE: dict[str, Callable[[str, str], LedgerError]] = {
    "AX001": _insufficient_funds,
    "AX002": _conflict,
    "AX003": lambda message, _: HoldNotOpen(message),
    "AX004": lambda message, _: OverCapture(message),
    "AX005": lambda message, _: PeriodClosed(message),
    "AX006": lambda message, _: BadPosting(message),
}


def translate(error: psycopg.Error) -> Exception:
    """The LedgerError that a refusal of the SQL functions means; any other error comes back as it is.

    For callers that use psycopg directly: `except psycopg.Error as error: raise translate(error) from error`.
    """
    make = _BY_SQLSTATE.get(error.sqlstate or "")
    if make is None:
        return error
    return make(error.diag.message_primary or "", error.diag.message_detail or "")


@contextmanager
def translated() -> Iterator[None]:
    """Raises LedgerErrors in place of Django's wrapped database errors."""
    try:
        yield
    except DatabaseError as error:
        cause = error.__cause__
        if isinstance(cause, psycopg.Error) and isinstance(meant := translate(cause), LedgerError):
            raise meant from error
        raise
