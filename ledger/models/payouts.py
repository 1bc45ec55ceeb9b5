"""What we pay to providers of compute."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from ledger.models.fields import money_field


class Payout(models.Model):
    """A bank transfer to a provider. Written before anybody tells the bank; booked on the bank's proof."""

    class State(models.TextChoices):
        INTENDED = "intended"
        SENT = "sent"  # the bank has the order; its statement does not show it yet
        PAID = "paid"  # the bank's statement shows it: booked
        CANCELLED = "cancelled"  # never sent, or sent back by the bank

    OPEN = (State.INTENDED, State.SENT)

    public_id = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    payee = models.CharField(max_length=120)
    amount = money_field()
    state = models.CharField(max_length=10, choices=State, default=State.INTENDED)
    idempotency_key = models.CharField(max_length=200, unique=True)
    bank_reference = models.CharField(max_length=64, null=True, unique=True)
    note = models.CharField(max_length=500, blank=True)
    actor = models.CharField(max_length=120)
    created_at = models.DateTimeField(db_default=Now())
    changed_at = models.DateTimeField(db_default=Now())

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[Payout]] = models.Manager()

    class Meta:
        db_table = "ledger_payout"
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(amount__gt=0), name="payout_amount_positive"),
            models.CheckConstraint(
                condition=~Q(state="paid") | Q(bank_reference__isnull=False), name="payout_paid_with_proof"
            ),
        ]
        indexes = [
            models.Index(
                fields=["created_at"], condition=Q(state__in=["intended", "sent"]), name="payout_open"
            )
        ]

    def __str__(self) -> str:
        return f"payout {self.public_id}"
