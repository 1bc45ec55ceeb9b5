"""What a payment rail has to be able to do. One class per rail; all that books money knows only this.

Rails: `orders` (PayPal's Orders v2, client.py) and `ipn` (PayPal's older buttons and notifications, ipn/).
Both are one provider, so a payment that both tell of is one settlement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

from djmoney.money import Money


class GatewayUnavailable(Exception):
    """No answer, or none that says anything. What was asked may or may not have happened: ask again."""


class GatewayRefused(Exception):
    """The provider said no and did nothing. `issue` is its name for the reason."""

    def __init__(self, issue: str, detail: str = "") -> None:
        super().__init__(f"{issue}: {detail}" if detail else issue)
        self.issue = issue


class OrderStatus(StrEnum):
    OPEN = "open"  # the payer has not agreed yet
    APPROVED = "approved"  # the payer agreed, nothing is captured
    COMPLETED = "completed"  # a capture was made; look at it, it may be pending
    VOID = "void"  # it can never be paid any more


class CaptureStatus(StrEnum):
    COMPLETED = "completed"  # the money is ours
    PENDING = "pending"  # the provider keeps it for now
    FAILED = "failed"  # declined: there is no money


class ReturnStatus(StrEnum):
    COMPLETED = "completed"
    PENDING = "pending"  # nothing has moved yet
    FAILED = "failed"  # it did not happen, or was taken back


class ReturnKind(StrEnum):
    """Why money of a capture moved after it. All but the last take it away from us."""

    REFUND = "refund"  # we sent it back
    REVERSAL = "reversal"  # the provider took it: chargeback, claim
    REVERSAL_CANCELLED = "reversal_cancelled"  # the provider gave it back to us


@dataclass(frozen=True, slots=True)
class Capture:
    """Money taken. `gross` and `fee` are known when it is completed.

    `converted` is what the net became when the provider changed it into another currency on receipt.
    """

    external_id: str
    status: CaptureStatus
    currency: str
    gross: Decimal
    fee: Decimal
    captured_at: datetime
    converted: Money | None = None


@dataclass(frozen=True, slots=True)
class Return:
    """Money of a capture that moved later. `gross` >= 0 is the payer's side; `fee` >= 0 the part of the
    provider's fee that moved with it. `reference` is our own id in it, "" when we did not ask for it.
    `converted` is what it cost us when the provider took it out of another currency."""

    external_id: str
    capture_id: str
    kind: ReturnKind
    status: ReturnStatus
    currency: str
    gross: Decimal
    fee: Decimal
    reference: str
    occurred_at: datetime
    converted: Money | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """`approve_url` is where the payer agrees, "" once that is over. `reference` is our own id in it."""

    order_id: str
    status: OrderStatus
    approve_url: str
    reference: str
    captures: Sequence[Capture]
    refund_ids: Sequence[str] = ()


class PaymentGateway(Protocol):
    """Every call may be repeated. Each raises GatewayUnavailable or GatewayRefused.

    `provider` names it in the settlement rows, `rail` in our own purchases.
    """

    provider: str
    rail: str

    def check_amount(self, amount: Money) -> None:
        """Raises ValueError when the provider cannot take this amount exactly."""

    def create_order(
        self, *, amount: Money, reference: str, request_id: str, return_url: str, cancel_url: str
    ) -> Order:
        """The same request id gives the same order."""

    def read_order(self, order_id: str) -> Order: ...

    def capture_order(self, order_id: str, *, request_id: str) -> Order:
        """Takes the money of an approved order. The same request id takes it once."""

    def refund_capture(
        self, capture_id: str, *, amount: Money, reference: str, request_id: str, note: str
    ) -> Return:
        """Sends money back. The same request id sends it once; `note` is shown to the payer."""

    def read_return(self, external_id: str) -> Return:
        """A refund or reversal as it stands."""
