"""Our settlements against the provider's own list, day by day, and what does not fit."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from ledger.models.fields import decimal_field


class Reconciliation(models.Model):
    """One comparison of one UTC day. A day may be compared again; the last one counts."""

    provider = models.CharField(max_length=20)
    day = models.DateField()
    theirs = models.PositiveIntegerField(help_text="Movements in the provider's list.")
    ours = models.PositiveIntegerField(help_text="Settlements of that day.")
    healed = models.PositiveIntegerField(help_text="Movements that were booked by the comparison.")
    differences = models.PositiveIntegerField(help_text="Open after it.")
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "ledger_reconciliation"
        ordering = ["-id"]
        indexes = [models.Index(fields=["provider", "day"], name="reconciliation_by_day")]

    def __str__(self) -> str:
        return f"{self.provider} {self.day}"


class Difference(models.Model):
    """Something that the provider's list and our books do not agree on. Signed: above zero came to us."""

    class Kind(models.TextChoices):
        MISSING_HERE = "missing_here"  # the provider moved it, we have not booked it
        MISSING_THERE = "missing_there"  # we booked it, the provider does not list it
        FIGURES_DIFFER = "figures_differ"  # amount, fee or currency
        BALANCE_DIFFERS = "balance_differs"  # the provider's balance at the end of the day against clearing

    provider = models.CharField(max_length=20)
    kind = models.CharField(max_length=20, choices=Kind)
    external_id = models.CharField(max_length=64, help_text="Of the movement; the currency for a balance.")
    day = models.DateField()
    currency = models.CharField(max_length=3)
    code = models.CharField(max_length=10, blank=True, help_text="The provider's event code.")
    their_gross = decimal_field(null=True)
    their_fee = decimal_field(null=True)
    our_gross = decimal_field(null=True)
    our_fee = decimal_field(null=True)
    detail = models.CharField(max_length=300, blank=True)
    found_at = models.DateTimeField(db_default=Now())
    seen_at = models.DateTimeField(db_default=Now(), help_text="When a comparison last met it.")
    resolved_at = models.DateTimeField(null=True)
    resolved_by = models.CharField(max_length=120, blank=True, db_default="")
    resolution = models.CharField(max_length=500, blank=True, db_default="")

    class Meta:
        db_table = "ledger_difference"
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["provider", "kind", "external_id", "day"], name="difference_once"
            ),
            models.CheckConstraint(
                condition=Q(resolved_at__isnull=True) | ~Q(resolved_by=""),
                name="difference_resolved_by_somebody",
            ),
        ]
        indexes = [
            models.Index(fields=["found_at"], condition=Q(resolved_at__isnull=True), name="difference_open")
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.external_id}"
