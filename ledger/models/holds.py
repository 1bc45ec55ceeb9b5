"""Holds: credit set aside before work is done."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from ledger.models.accounts import Account
from ledger.models.fields import decimal_field, money_field
from ledger.models.journals import Journal


class Hold(models.Model):
    """Open exactly once, closed exactly once. While open, `amount` is part of its balance's `held`."""

    class State(models.TextChoices):
        OPEN = "open"
        CAPTURED = "captured"
        VOIDED = "voided"
        EXPIRED = "expired"

    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="holds", db_constraint=False)
    amount = money_field()
    captured = decimal_field(default=0)
    key = models.CharField(max_length=200, unique=True)
    state = models.CharField(max_length=10, choices=State, default=State.OPEN)
    actor = models.CharField(max_length=120)
    ttl = models.DurationField()
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)
    # The journal that captured it; one may capture many.
    journal = models.ForeignKey(Journal, null=True, on_delete=models.PROTECT, related_name="holds")

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[Hold]] = models.Manager()

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(amount__gt=0), name="hold_amount_positive"),
            models.CheckConstraint(
                condition=Q(captured__gte=0) & Q(captured__lte=F("amount")), name="hold_captured_within"
            ),
            models.CheckConstraint(
                condition=Q(state="open", closed_at__isnull=True)
                | (~Q(state="open") & Q(closed_at__isnull=False)),
                name="hold_closed_iff_not_open",
            ),
            models.CheckConstraint(
                condition=Q(state="captured", journal__isnull=False)
                | (~Q(state="captured") & Q(journal__isnull=True, captured=0)),
                name="hold_journal_iff_captured",
            ),
        ]
        indexes = [models.Index(fields=["expires_at"], condition=Q(state="open"), name="hold_open_by_expiry")]

    def __str__(self) -> str:
        return f"hold {self.key}"
