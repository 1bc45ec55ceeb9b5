"""What happens when a wallet runs low: a notice by mail, and a purchase that is prepared for approval."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from brokerage.models.customers import Customer


class LowBalanceRule(models.Model):
    """What a customer asked for, in its currency; empty is off. No money ever moves without the payer's consent."""

    customer = models.OneToOneField(
        Customer, on_delete=models.PROTECT, primary_key=True, related_name="low_balance_rule"
    )
    notice_below = models.DecimalField(max_digits=24, decimal_places=9, null=True)
    top_up_below = models.DecimalField(max_digits=24, decimal_places=9, null=True)
    top_up_amount = models.DecimalField(max_digits=24, decimal_places=9, null=True)
    monthly_cap = models.DecimalField(max_digits=24, decimal_places=9, null=True)

    class Meta:
        ordering = ["customer"]
        constraints = [
            models.CheckConstraint(
                condition=Q(notice_below__isnull=True) | Q(notice_below__gt=0), name="notice_below_positive"
            ),
            models.CheckConstraint(
                condition=Q(top_up_below__isnull=True, top_up_amount__isnull=True, monthly_cap__isnull=True)
                | Q(top_up_below__gt=0, top_up_amount__gt=0, monthly_cap__gte=models.F("top_up_amount")),
                name="top_up_rule_whole",
            ),
        ]

    def __str__(self) -> str:
        return f"low balance rule of {self.customer}"


class Mailed(models.Model):
    """The intent to mail: sent by who claims it until `claimed_until`, tried again until `mailed_at` is set."""

    mailed_at = models.DateTimeField(null=True)
    claimed_until = models.DateTimeField(null=True)

    class Meta:
        abstract = True


class LowBalanceNotice(Mailed):
    """One crossing below the threshold; open until the balance is no longer below it."""

    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="low_balance_notices")
    threshold = models.DecimalField(max_digits=24, decimal_places=9)
    available = models.DecimalField(max_digits=24, decimal_places=9)
    crossed_at = models.DateTimeField(db_default=Now())
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["customer"], condition=Q(closed_at__isnull=True), name="low_balance_noticed_once"
            )
        ]

    def __str__(self) -> str:
        return f"low balance of {self.customer}"


class PreparedTopUp(Mailed):
    """A purchase made ready by the rule. `key` is its idempotency key, kept before PayPal is asked.

    Open until it is settled or the balance has risen, so one crossing asks the payer once.
    """

    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="prepared_top_ups")
    amount = models.DecimalField(max_digits=24, decimal_places=9)
    key = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    top_up = models.OneToOneField(
        "ledger.TopUp", null=True, on_delete=models.PROTECT, related_name="prepared"
    )
    created_at = models.DateTimeField(db_default=Now())
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["customer"], condition=Q(closed_at__isnull=True), name="prepared_top_up_one_open"
            ),
            models.CheckConstraint(condition=Q(amount__gt=0), name="prepared_top_up_positive"),
        ]

    def __str__(self) -> str:
        return f"prepared top-up of {self.customer}"
