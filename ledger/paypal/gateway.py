"""What a payment provider has to be able to do. One class per rail; `orders` knows only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class Capture:
    """Money taken. `gross` and `fee` are known when it is completed."""

    external_id: str
    status: CaptureStatus
    currency: str
    gross: Decimal
    fee: Decimal
    captured_at: datetime


@dataclass(frozen=True, slots=True)
class Order:
    """`approve_url` is where the payer agrees, "" once that is over. `reference` is our own id in it."""

    order_id: str
    status: OrderStatus
    approve_url: str
    reference: str
    captures: Sequence[Capture]


class PaymentGateway(ABC):
    """Every call may be repeated. Each raises GatewayUnavailable or GatewayRefused."""

    provider: str

    @abstractmethod
    def check_amount(self, amount: Money) -> None:
        """Raises ValueError when the provider cannot take this amount exactly."""

    @abstractmethod
    def create_order(
        self, *, amount: Money, reference: str, request_id: str, return_url: str, cancel_url: str
    ) -> Order:
        """The same request id gives the same order."""

    @abstractmethod
    def read_order(self, order_id: str) -> Order: ...

    @abstractmethod
    def capture_order(self, order_id: str, *, request_id: str) -> Order:
        """Takes the money of an approved order. The same request id takes it once."""
