"""What the portal reads. Every function takes the customer: nothing is read across customers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce, TruncDate

from brokerage.models import APIKey, Customer, Project, ServedModel, UsageEvent
from ledger.models import CreditGrant, Hold, Journal, TopUp
from ledger.selectors import OpenGrant, Wallet, open_grants


@dataclass(frozen=True, slots=True)
class UsageDay:
    """One UTC day. `cost` counts what is charged; answers of the last seconds may still be on their way."""

    day: date
    answers: int
    tokens: int
    cost: Decimal

    @property
    def starts_at(self) -> datetime:
        return datetime.combine(self.day, time.min, UTC)


def usage_by_day(customer: Customer, *, project: Project | None = None, days: int = 30) -> list[UsageDay]:
    """The last `days` days up to today, oldest first, quiet days included. One query."""
    today = datetime.now(UTC).date()
    first = today - timedelta(days=days - 1)
    usage = UsageEvent.objects.filter(
        customer=customer, finished_at__gte=datetime.combine(first, time.min, UTC)
    )
    if project is not None:
        usage = usage.filter(api_key__project=project)
    rows = (
        usage.annotate(day=TruncDate("finished_at", tzinfo=UTC))
        .values("day")
        .order_by("day")
        .annotate(
            answers=Count("pk"),
            tokens=Sum(F("prompt_tokens") + F("completion_tokens")),
            cost=Sum("amount", default=Decimal(0)),
        )
    )
    found = {row["day"]: UsageDay(row["day"], row["answers"], row["tokens"], row["cost"]) for row in rows}
    every = (first + timedelta(days=n) for n in range(days))
    return [found.get(day) or UsageDay(day, 0, 0, Decimal(0)) for day in every]


def projects_of(customer: Customer) -> QuerySet[Project]:
    """With `active_keys`, and `spent` in the last 30 days, today included, as usage_by_day counts them."""
    first = datetime.combine(datetime.now(UTC).date() - timedelta(days=29), time.min, UTC)
    spent = (
        UsageEvent.objects.filter(customer=customer, finished_at__gte=first, api_key__project=OuterRef("pk"))
        .order_by()
        .values("api_key__project")
        .annotate(total=Sum("amount"))
        .values("total")
    )
    keys = Count("api_keys", filter=Q(api_keys__revoked_at__isnull=True))
    return (
        Project.objects.filter(customer=customer)
        .select_related("customer")
        .annotate(active_keys=keys, spent=Coalesce(Subquery(spent), Decimal(0)))
    )


def usage_of(
    customer: Customer, *, charge: UUID | None = None, project: Project | None = None
) -> QuerySet[UsageEvent]:
    """Newest first, in the order of the index usage_by_customer. `charge`: the journal that took their price."""
    usage = UsageEvent.objects.filter(customer=customer)
    if charge is not None:
        usage = usage.filter(journal_id__in=Journal.objects.filter(public_id=charge).values("pk"))
    if project is not None:
        usage = usage.filter(api_key__project=project)
    return usage.select_related("served_model", "api_key").order_by("-finished_at")


_KINDS = {
    CreditGrant.Kind.PAID: "Bought under terms",
    CreditGrant.Kind.PROMOTIONAL: "Promotional",
    CreditGrant.Kind.REFUND: "Refunded",
    CreditGrant.Kind.SLA: "Service credit",
}


@dataclass(frozen=True, slots=True)
class GrantRow(OpenGrant):
    """A grant as the customer reads it: our note on it is not theirs to see."""

    @property
    def label(self) -> str:
        return _KINDS[CreditGrant.Kind(self.kind)]


@dataclass(frozen=True, slots=True)
class CreditByKind:
    """What a wallet's balance is made of, in the order of draws; `bought` comes last and has no end."""

    grants: list[GrantRow]
    bought: Decimal


def credit_by_kind(wallet: Wallet) -> CreditByKind:
    """One query. Expired credit that is not booked yet is in neither part."""
    grants = [GrantRow(**asdict(grant)) for grant in open_grants(account_id=wallet.account_id)]
    return CreditByKind(grants, wallet.posted - wallet.granted)


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """How far a new customer has come."""

    has_credit: bool
    has_key: bool
    has_usage: bool

    @property
    def done(self) -> bool:
        return self.has_usage and self.has_key


def first_steps(customer: Customer, wallet: Wallet) -> FirstSteps:
    return FirstSteps(
        has_credit=wallet.posted > 0,
        has_key=APIKey.objects.filter(customer=customer, revoked_at__isnull=True).exists(),
        has_usage=UsageEvent.objects.filter(customer=customer).exists(),
    )


def example_model() -> str:
    """A model name for the examples; a made-up one while nothing is served."""
    name = ServedModel.objects.filter(enabled=True).values_list("name", flat=True).first()
    return name or "model-name"


def holds_of(customer: Customer) -> QuerySet[Hold]:
    return Hold.objects.filter(account__code=customer.wallet_code).order_by("-id")


def top_ups_of(customer: Customer) -> QuerySet[TopUp]:
    return TopUp.objects.filter(account__code=customer.wallet_code).order_by("-id")
