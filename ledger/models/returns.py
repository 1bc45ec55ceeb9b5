"""Money going back: refunds that we ask for, and disputes that the payer opens."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from ledger.models.accounts import Account
from ledger.models.fields import money_field
from ledger.models.holds import Hold
from ledger.models.payments import Settlement


class Refund(models.Model):
    """Somebody's decision to send money back. Written before the provider is called; books nothing itself.

    While it is unfinished, as much of it as the wallet has is held, so that it is not spent meanwhile.
    """

    class State(models.TextChoices):
        STARTED = "started"  # intent only: the provider may or may not know of it
        PENDING = "pending"  # the provider has it and has not sent the money yet
        COMPLETED = "completed"  # the money went back and is booked
        FAILED = "failed"  # refused, or taken back: nothing went

    UNFINISHED = (State.STARTED, State.PENDING)

    public_id = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    capture = models.ForeignKey(Settlement, on_delete=models.PROTECT, related_name="refund_requests")
    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="refund_requests")
    amount = money_field()
    state = models.CharField(max_length=10, choices=State, default=State.STARTED)
    idempotency_key = models.CharField(max_length=200, unique=True)
    request_id = models.UUIDField(default=uuid.uuid4, editable=False)
    external_id = models.CharField(max_length=64, null=True, unique=True)
    hold = models.ForeignKey(Hold, null=True, on_delete=models.PROTECT, db_constraint=False, related_name="+")
    reason = models.CharField(max_length=500)
    note_to_payer = models.CharField(max_length=200, blank=True)
    failure = models.CharField(max_length=200, blank=True)
    actor = models.CharField(max_length=120)
    created_at = models.DateTimeField(db_default=Now())
    changed_at = models.DateTimeField(db_default=Now())

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[Refund]] = models.Manager()

    class Meta:
        db_table = "ledger_refund"
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(amount__gt=0), name="refund_amount_positive"),
            models.CheckConstraint(
                condition=~Q(state__in=["pending", "completed"]) | Q(external_id__isnull=False),
                name="refund_external_id_known",
            ),
        ]
        indexes = [
            models.Index(
                fields=["changed_at"], condition=Q(state__in=["started", "pending"]), name="refund_unfinished"
            )
        ]

    def __str__(self) -> str:
        return f"refund {self.public_id}"


class Dispute(models.Model):
    """A payer's complaint about a capture, as the provider last told it. Holds credit while it may be lost.

    Money that moves because of it is a settlement of its own (reversal, refund), never this row.
    """

    class State(models.TextChoices):
        OPEN = "open"
        WON = "won"  # also: cancelled, or paid by the provider
        LOST = "lost"

    provider = models.CharField(max_length=20)
    external_id = models.CharField(max_length=64)
    capture_id = models.CharField(max_length=64)
    amount = money_field(currency_field_name="currency")
    state = models.CharField(max_length=10, choices=State)
    stage = models.CharField(max_length=60, blank=True)
    reason = models.CharField(max_length=100, blank=True)
    outcome = models.CharField(max_length=100, blank=True)
    hold = models.ForeignKey(Hold, null=True, on_delete=models.PROTECT, db_constraint=False, related_name="+")
    holds_made = models.PositiveIntegerField(db_default=0)
    opened_at = models.DateTimeField()
    told_at = models.DateTimeField(help_text="The provider's time of this state.")
    changed_at = models.DateTimeField(db_default=Now())

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[Dispute]] = models.Manager()

    class Meta:
        db_table = "ledger_dispute"
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["provider", "external_id"], name="dispute_once"),
            models.CheckConstraint(condition=Q(amount__gt=0), name="dispute_amount_positive"),
        ]
        indexes = [models.Index(fields=["provider", "capture_id"], name="dispute_by_capture")]

    def __str__(self) -> str:
        return f"dispute {self.external_id}"
