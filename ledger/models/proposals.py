"""What staff want to do to the books, and who else agreed."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Length, Now
from django.db.models.lookups import GreaterThanOrEqual

from ledger.models.accounts import Account
from ledger.models.fields import money_field
from ledger.models.journals import Journal

REASON_MIN = 10  # characters: enough for a word and a reference


class Proposal(models.Model):
    """A correction of the books by hand: proposed by one person, done when another one approves.

    The row is the intent; its `public_id` is the key under which the journal is booked, so an approval
    that is repeated after a crash books nothing twice. sql/proposals.sql keeps decided rows as they are.
    """

    class Kind(models.TextChoices):
        ADJUSTMENT = "adjustment", "adjust a wallet"
        GRANT = "grant", "grant credit"
        WRITE_OFF = "write_off", "write off a debt"
        REVERSAL = "reversal", "reverse a journal"
        REFUND = "refund", "refund a purchase"
        BILL = "bill", "book a provider's bill"
        PAYOUT = "payout", "pay a provider"
        CLOSE_PERIOD = "close_period", "close a period"
        REOPEN_PERIOD = "reopen_period", "reopen a period"

    class State(models.TextChoices):
        OPEN = "open"
        APPROVED = "approved"
        REJECTED = "rejected"
        WITHDRAWN = "withdrawn"

    public_id = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    kind = models.CharField(max_length=20, choices=Kind)
    summary = models.CharField(max_length=300, help_text="What is asked for, in one line.")
    payload = models.JSONField(help_text="The same for the program; its keys depend on the kind.")
    account = models.ForeignKey(Account, null=True, on_delete=models.PROTECT, related_name="proposals")
    amount = money_field(null=True)
    reason = models.TextField()
    state = models.CharField(max_length=10, choices=State, default=State.OPEN)
    proposed_by = models.CharField(max_length=120)
    proposed_at = models.DateTimeField(db_default=Now())
    decided_by = models.CharField(max_length=120, blank=True)
    decided_at = models.DateTimeField(null=True)
    note = models.TextField(blank=True, help_text="What the decider had to say.")
    journal = models.OneToOneField(Journal, null=True, on_delete=models.PROTECT, related_name="proposal")

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[Proposal]] = models.Manager()

    class Meta:
        db_table = "ledger_proposal"
        ordering = ["-id"]
        permissions = [("decide_large_proposal", "Can approve proposals above the limit")]
        constraints = [
            models.CheckConstraint(
                condition=~Q(state="approved") | ~Q(decided_by=F("proposed_by")),
                name="proposal_by_two_people",
            ),
            models.CheckConstraint(
                condition=Q(state="open", decided_at__isnull=True, decided_by="")
                | (~Q(state="open") & Q(decided_at__isnull=False) & ~Q(decided_by="")),
                name="proposal_decided_iff_not_open",
            ),
            models.CheckConstraint(
                condition=GreaterThanOrEqual(Length("reason"), REASON_MIN), name="proposal_says_why"
            ),
        ]
        indexes = [
            models.Index(fields=["id"], condition=Q(state="open"), name="proposal_open"),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.summary}"
