"""Budgets of keys, projects and customers, and the time zone that their windows follow.

Effective at once; for a customer whose requests a credit lease covers, within a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from zoneinfo import available_timezones

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import DataError, connection, transaction

from brokerage.models import APIKey, Budget, Customer, Project
from brokerage.services.audit import record


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """`spent` is final, `held` is the most that answers under way can add. In the customer's currency."""

    budget_id: int
    amount: Decimal
    spent: Decimal
    held: Decimal
    window_start: datetime
    window_end: datetime

    @property
    def left(self) -> Decimal:
        """Never below zero: a budget may be lowered below what is spent."""
        return max(Decimal(0), self.amount - self.spent - self.held)


def budget_status(customer: Customer) -> dict[int, BudgetStatus]:
    """Where each budget of the customer stands now, by its id."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT budget_id, amount, spent, held, window_start, window_end FROM budget_status(%s)",
            [customer.pk],
        )
        return {row[0]: BudgetStatus(*row) for row in cursor.fetchall()}


@transaction.atomic
def set_budget(
    *,
    customer: Customer,
    period: Budget.Period,
    amount: Decimal,
    actor: User | None,
    api_key: APIKey | None = None,
    project: Project | None = None,
) -> Budget:
    """One for each of (customer, a key or a project or all, period). What was spent in the running window counts.

    Raises ValidationError, keyed by field.
    """
    if api_key is not None and api_key.customer_id != customer.pk:
        raise ValidationError({"api_key": "This key belongs to another customer."})
    if project is not None and project.customer_id != customer.pk:
        raise ValidationError({"project": "This project belongs to another customer."})
    if project is not None and api_key is not None:
        raise ValidationError({"project": "A budget is for a key or for a project, not for both."})
    if amount < 0:
        raise ValidationError({"amount": "A budget must not be negative."})
    _lock_wallet(customer)
    about = {"customer": customer, "api_key": api_key, "project": project, "period": period}
    budget = Budget.objects.filter(**about).first()
    if budget is not None and budget.amount == amount:
        return budget
    budget = budget or Budget(**about)
    budget.amount = amount
    budget.clean_fields(exclude={"window_start", "created_at"})
    budget.save()
    _recount(customer)
    budget.refresh_from_db()
    record("budget.set", actor=actor, subject=budget, **_facts(budget), amount=str(amount))
    return budget


@transaction.atomic
def remove_budget(*, budget: Budget, actor: User | None) -> bool:
    """True when this call removed it."""
    _lock_wallet(budget.customer)
    removed, _ = Budget.objects.filter(pk=budget.pk).delete()
    if removed:
        record("budget.removed", actor=actor, subject=budget, **_facts(budget))
    return bool(removed)


@transaction.atomic
def set_time_zone(*, customer: Customer, time_zone: str, actor: User | None) -> bool:
    """An IANA name. Windows begin at the new midnights from now on; what lies in them counts.

    True when this call changed it. Raises ValidationError for a zone that is not known everywhere.
    """
    check_zone(time_zone)
    _lock_wallet(customer)
    customer.time_zone = time_zone
    changed = Customer.objects.filter(pk=customer.pk).exclude(time_zone=time_zone).update(time_zone=time_zone)
    if changed:
        _recount(customer)
        record("customer.time_zone_changed", actor=actor, subject=customer, time_zone=time_zone)
    return bool(changed)


def check_zone(name: str) -> None:
    """Python tells the customer when a window ends, PostgreSQL decides it: both must know the zone."""
    unknown = ValidationError({"time_zone": f"{name!r} is no time zone; try Europe/Berlin, for example."})
    if name not in available_timezones():
        raise unknown
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT now() AT TIME ZONE %s", [name])
    except DataError:
        raise unknown from None


def _facts(budget: Budget) -> dict[str, str | None]:
    return {
        "customer": str(budget.customer_id),
        "api_key": str(budget.api_key_id) if budget.api_key_id else None,
        "project": str(budget.project_id) if budget.project_id else None,
        "period": budget.period,
    }


def _lock_wallet(customer: Customer) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT budget_lock_wallet(%s)", [customer.pk])


def _recount(customer: Customer) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT budget_recount(%s)", [customer.pk])
