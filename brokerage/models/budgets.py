"""How much may be spent in a day or a month. Written by sql/budgets.sql and services/budgets.py."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from brokerage.models.customers import APIKey, Customer
from brokerage.models.projects import Project


class Budget(models.Model):
    """The most that a customer, a project or a key of it may spend in a window; in the customer's currency.

    Windows begin at midnight, or on the first of a month, in the customer's time zone.
    """

    class Period(models.TextChoices):
        DAILY = "daily"
        MONTHLY = "monthly"

    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="budgets")
    api_key = models.ForeignKey(
        APIKey,
        on_delete=models.PROTECT,
        related_name="budgets",
        null=True,
        blank=True,
        verbose_name="API key",
        help_text="Empty: for all keys of the project, or of the customer, together.",
    )
    project = models.ForeignKey(
        Project,
        on_delete=models.PROTECT,
        related_name="budgets",
        null=True,
        blank=True,
        help_text="Empty: not for one project.",
    )
    period = models.CharField(max_length=10, choices=Period)
    amount = models.DecimalField(max_digits=24, decimal_places=9)
    # Of the window that begins at `window_start`, as far as it is final; see sql/budgets.sql.
    spent = models.DecimalField(max_digits=24, decimal_places=9, default=0, editable=False)
    window_start = models.DateTimeField(db_default=Now(), editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["customer", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["customer", "project", "api_key", "period"], nulls_distinct=False, name="budget_once"
            ),
            models.CheckConstraint(
                condition=Q(api_key__isnull=True) | Q(project__isnull=True), name="budget_of_key_or_project"
            ),
            # Zero is a budget too: nothing that costs anything.
            models.CheckConstraint(condition=Q(amount__gte=0, spent__gte=0), name="budget_not_negative"),
        ]

    def __str__(self) -> str:
        return f"{self.get_period_display()} budget of {self.api_key or self.project or self.customer}"


class BudgetedHold(models.Model):
    """A hold that counts against budgets and is not final yet. Lives as long as its answer."""

    request_id = models.UUIDField(primary_key=True)
    hold_id = models.BigIntegerField()
    # Without constraints of their own: written once a request, from rows that are never deleted.
    customer = models.ForeignKey(Customer, on_delete=models.DO_NOTHING, related_name="+", db_constraint=False)
    api_key = models.ForeignKey(
        APIKey, on_delete=models.DO_NOTHING, related_name="+", db_constraint=False, db_index=False
    )
    admitted_at = models.DateTimeField()

    def __str__(self) -> str:
        return str(self.request_id)
