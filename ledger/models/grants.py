"""Credit that has terms of its own, and every draw on it. What a wallet has beyond its grants is paid credit."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from ledger.models.accounts import Account
from ledger.models.fields import decimal_field, money_field
from ledger.models.journals import Journal


class CreditGrant(models.Model):
    """Drawn on promotional first, then by earliest expiry, lower priority number, age; paid credit comes last.

    `remaining` = amount - the sum of its uses. `recognised` is what of a promotional grant is booked as an
    expense already.
    """

    class Kind(models.TextChoices):
        PAID = "paid"  # bought under terms: its end is breakage
        PROMOTIONAL = "promotional"  # a promise: an expense when it is used, nothing when it ends
        REFUND = "refund"  # given back as credit: its end is breakage
        SLA = "sla"  # amends for a broken promise

    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="grants")
    kind = models.CharField(max_length=12, choices=Kind)
    amount = money_field()
    remaining = decimal_field()
    recognised = decimal_field(default=0)
    priority = models.PositiveSmallIntegerField(default=50, help_text="1 is drawn on first, 100 last.")
    expires_at = models.DateTimeField(null=True)
    journal = models.OneToOneField(Journal, on_delete=models.PROTECT, related_name="grant")
    note = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(db_default=Now())

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[CreditGrant]] = models.Manager()

    class Meta:
        db_table = "credit_grant"
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(amount__gt=0), name="grant_amount_positive"),
            models.CheckConstraint(
                condition=Q(remaining__gte=0) & Q(remaining__lte=F("amount")), name="grant_remaining_within"
            ),
            models.CheckConstraint(
                condition=Q(priority__gte=1) & Q(priority__lte=100), name="grant_priority_within"
            ),
            models.CheckConstraint(
                condition=Q(kind__in=["paid", "promotional", "refund", "sla"]), name="grant_kind_known"
            ),
        ]
        indexes = [
            models.Index(fields=["account"], condition=Q(remaining__gt=0), name="grant_open_by_account"),
            models.Index(fields=["expires_at"], condition=Q(remaining__gt=0), name="grant_open_by_expiry"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} grant {self.pk}"


class GrantUse(models.Model):
    """What a journal took from a grant (> 0) or gave back to it (< 0). Rows are final."""

    grant = models.ForeignKey(CreditGrant, on_delete=models.PROTECT, related_name="uses")
    journal = models.ForeignKey(
        Journal, on_delete=models.PROTECT, related_name="grant_uses", db_constraint=False
    )
    amount = decimal_field()

    class Meta:
        db_table = "grant_use"
        ordering = ["id"]
        constraints = [models.CheckConstraint(condition=~Q(amount=0), name="grant_use_not_zero")]

    def __str__(self) -> str:
        return f"{self.amount} of grant {self.grant_id}"
