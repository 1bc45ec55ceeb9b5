"""What was delivered: one usage event per answer, one cost row per leg."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from brokerage.models.catalogue import ModelPrice, ServedModel
from brokerage.models.customers import APIKey, Customer


class UsageEvent(models.Model):
    """An answer as the customer pays it. The primary key is the request id: it counts once.

    Written by the gateway, charged later in batches: `amount` and `journal_id` are set together,
    once, by the charge.
    """

    request_id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="usage")
    api_key = models.ForeignKey(APIKey, on_delete=models.PROTECT, related_name="usage")
    served_model = models.ForeignKey(ServedModel, on_delete=models.PROTECT, related_name="usage")
    # The price that was shown to the customer when the request was admitted.
    price = models.ForeignKey(ModelPrice, on_delete=models.PROTECT, related_name="+")
    hold_id = models.BigIntegerField(null=True, help_text="Hold in the ledger that this usage captures.")
    outcome = models.CharField(max_length=20)
    prompt_tokens = models.PositiveIntegerField()
    completion_tokens = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    amount = models.DecimalField(max_digits=24, decimal_places=9, null=True, editable=False)
    currency = models.CharField(max_length=3)
    # One journal takes what a wallet's answers of a moment cost together.
    journal_id = models.BigIntegerField(null=True, db_index=True, editable=False)
    charged_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        db_table = "usage_event"
        ordering = ["-created_at"]
        constraints = [
            models.CheckConstraint(
                condition=Q(charged_at__isnull=True, amount__isnull=True)
                | Q(charged_at__isnull=False, amount__isnull=False, amount__gte=0),
                name="usage_amount_iff_charged",
            ),
            models.CheckConstraint(
                # Money that was taken has a journal, and only that.
                condition=Q(charged_at__isnull=True, journal_id__isnull=True)
                | Q(amount=0, journal_id__isnull=True)
                | Q(amount__gt=0, journal_id__isnull=False),
                name="usage_journal_iff_paid",
            ),
            models.CheckConstraint(
                condition=Q(finished_at__gte=F("started_at")), name="usage_times_in_order"
            ),
        ]
        indexes = [
            models.Index(fields=["created_at"], condition=Q(charged_at__isnull=True), name="usage_uncharged"),
            models.Index(fields=["customer", "-finished_at"], name="usage_by_customer"),
        ]

    def __str__(self) -> str:
        return str(self.request_id)


class LegCost(models.Model):
    """What one node did for an answer. Re-prefill of a resume is the platform's cost, not the customer's.

    `lost_tokens` were read or generated only because another node was lost or left before: `lost_to` names it.
    """

    usage = models.ForeignKey(UsageEvent, on_delete=models.PROTECT, related_name="legs")
    number = models.PositiveSmallIntegerField()
    node = models.CharField(max_length=100)
    prompt_tokens = models.PositiveIntegerField()
    completion_tokens = models.PositiveIntegerField()
    ended = models.CharField(max_length=20)
    lost_tokens = models.PositiveIntegerField(default=0, db_default=0)
    lost_to = models.CharField(max_length=100, blank=True, default="", db_default="")

    class Meta:
        ordering = ["usage", "number"]
        constraints = [
            models.UniqueConstraint(fields=["usage", "number"], name="leg_once"),
            models.CheckConstraint(
                condition=Q(lost_tokens=0, lost_to="") | (Q(lost_tokens__gt=0) & ~Q(lost_to="")),
                name="leg_loss_has_a_cause",
            ),
        ]
        indexes = [models.Index(fields=["lost_to"], condition=Q(lost_tokens__gt=0), name="leg_losses")]

    def __str__(self) -> str:
        return f"leg {self.number} on {self.node}"
