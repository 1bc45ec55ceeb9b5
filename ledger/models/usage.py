"""Metered usage, line by line: loaded by COPY, rated once, posted once."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from ledger.models.accounts import Account
from ledger.models.fields import decimal_field, money_field
from ledger.models.journals import Journal


class UsageLine(models.Model):
    """`amount` is what the line is worth, `charge` what it adds to the bill: less for one that corrects another."""

    event_id = models.CharField(max_length=100)
    account = models.ForeignKey(
        Account, on_delete=models.PROTECT, related_name="usage_lines", db_constraint=False, db_index=False
    )
    sku = models.CharField(max_length=100)
    quantity = models.DecimalField(max_digits=30, decimal_places=9)
    rate = models.DecimalField(
        max_digits=30, decimal_places=12, null=True, help_text="Empty: rated elsewhere."
    )
    amount = money_field()
    charge = decimal_field()
    corrects = models.OneToOneField("self", null=True, on_delete=models.PROTECT, related_name="corrected_by")
    occurred_at = models.DateTimeField()
    received_at = models.DateTimeField(db_default=Now())
    journal = models.ForeignKey(
        Journal, null=True, on_delete=models.PROTECT, related_name="usage_lines", db_constraint=False
    )

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[UsageLine]] = models.Manager()

    class Meta:
        db_table = "usage_line"
        ordering = ["-id"]
        constraints = [
            # Not unique=True: that would add an index for LIKE, which nobody asks with.
            models.UniqueConstraint(fields=["event_id"], name="usage_line_once"),
            models.CheckConstraint(
                condition=Q(quantity__gte=0) & Q(amount__gte=0), name="usage_line_not_negative"
            ),
        ]
        indexes = [
            models.Index(
                fields=["id"], condition=Q(journal__isnull=True) & ~Q(charge=0), name="usage_line_due"
            )
        ]

    def __str__(self) -> str:
        return self.event_id


class UsageReturn(models.Model):
    """What a correction gave back of the charge of an earlier line. Rows are final."""

    line = models.ForeignKey(UsageLine, on_delete=models.PROTECT, related_name="returns")
    correction = models.ForeignKey(
        UsageLine, on_delete=models.PROTECT, related_name="gave_back", db_index=False
    )
    amount = decimal_field()

    class Meta:
        db_table = "usage_return"
        constraints = [
            models.UniqueConstraint(fields=["correction", "line"], name="usage_return_once"),
            models.CheckConstraint(condition=Q(amount__gt=0), name="usage_return_above_zero"),
        ]

    def __str__(self) -> str:
        return f"{self.amount} of {self.line_id}"
