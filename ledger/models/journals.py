"""Journals and their legs: append-only, guarded by the triggers of sql/guards.sql."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from ledger.models.accounts import Account
from ledger.models.fields import decimal_field, money_field


class TransactionId(models.Field):
    """xid8: the transaction that wrote a row. Later legs are recognised by it, sealers trail by it."""

    def db_type(self, connection: Any) -> str:
        return "xid8"


class CurrentTransaction(models.Func):
    template = "pg_current_xact_id()"
    output_field = TransactionId()


class AccountingDate(models.Func):
    """The day a moment falls on in the books' time zone, which is UTC."""

    template = "(%(expressions)s AT TIME ZONE 'UTC')::date"


class Journal(models.Model):
    """One business event. Its legs sum to zero; (idem_scope, idem_key) happens once.

    `request_hash` is the SHA-256 of the lines as they were asked for, so that a replay is told from
    another request under the same key even when the lines were booked differently (debts).
    """

    public_id = models.UUIDField(unique=True)
    kind = models.CharField(max_length=60)
    currency = models.CharField(max_length=3)
    idem_scope = models.CharField(max_length=60)
    idem_key = models.CharField(max_length=200)
    request_hash = models.BinaryField(max_length=32)
    effective_at = models.DateTimeField()
    accounting_date = models.GeneratedField(
        expression=AccountingDate("effective_at"), output_field=models.DateField(), db_persist=True
    )
    reverses = models.OneToOneField("self", null=True, on_delete=models.PROTECT, related_name="reversed_by")
    group_id = models.UUIDField(null=True, help_text="Journals of one event in several currencies.")
    actor = models.CharField(max_length=120)
    meta = models.JSONField(default=dict)
    xact_id = TransactionId(db_default=CurrentTransaction(), editable=False)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["idem_scope", "idem_key"], name="journal_once"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.public_id}"


class Entry(models.Model):
    """One leg. The order of the ids is the order of an account's history."""

    id = models.BigAutoField(primary_key=True)
    # The guard on new legs looks at both instead (sql/guards.sql), and neither can be deleted.
    journal = models.ForeignKey(
        Journal, on_delete=models.PROTECT, related_name="entries", db_constraint=False
    )
    account = models.ForeignKey(
        Account, on_delete=models.PROTECT, related_name="entries", db_constraint=False, db_index=False
    )
    amount = money_field()
    # What a wallet has right after this leg; a platform account has no such line of history.
    balance = decimal_field(null=True)

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[Entry]] = models.Manager()

    class Meta:
        db_table = "ledger_entries"
        ordering = ["id"]
        verbose_name_plural = "entries"
        constraints = [models.CheckConstraint(condition=~Q(amount=0), name="entry_not_zero")]
        indexes = [models.Index(fields=["account", "id"], include=["amount"], name="entry_by_account")]

    def __str__(self) -> str:
        return f"entry {self.id}"


class PeriodClose(models.Model):
    """From here on no journal is dated on or before `closed_through`, until the next row says otherwise.

    An earlier day than that of the row before opens a period again. Corrections go to the open period.
    """

    closed_through = models.DateField()
    closed_by = models.CharField(max_length=120)
    note = models.TextField(blank=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "ledger_period_close"
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"closed through {self.closed_through}"
