"""Who did what to which object."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from ledger.models.journals import CurrentTransaction, TransactionId


class AuditEvent(models.Model):
    """Append-only. `xact_id` and `created_at` are set by the database, whatever is given."""

    id = models.BigAutoField(primary_key=True)
    shard = models.PositiveSmallIntegerField(default=0)
    actor = models.CharField(max_length=200)
    action = models.CharField(max_length=100)
    object_type = models.CharField(max_length=100)
    object_id = models.CharField(max_length=200)
    request_id = models.CharField(max_length=100, blank=True)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    xact_id = TransactionId(db_default=CurrentTransaction(), editable=False)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "audit_events"
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["object_type", "object_id"], name="audit_by_object"),
            # The order in which a shard is sealed.
            models.Index(fields=["shard", "xact_id", "id"], name="audit_by_transaction"),
        ]

    def __str__(self) -> str:
        return f"{self.action} by {self.actor}"


class AuditSeal(models.Model):
    """One link of a shard's chain: `hash` covers `prev_hash`, `seq` and every column of the event.

    Written by the SQL function audit_seal_events only. `event_id` and `xact_id` of the last link are where
    sealing goes on. The ids of events have gaps after rollbacks; `seq` has none.
    """

    pk = models.CompositePrimaryKey("shard", "seq")
    shard = models.PositiveSmallIntegerField()
    seq = models.BigIntegerField()
    event = models.OneToOneField(
        AuditEvent, on_delete=models.PROTECT, related_name="seal", db_constraint=False
    )
    xact_id = TransactionId(editable=False)
    version = models.PositiveSmallIntegerField(help_text="Of the canonical bytes.")
    prev_hash = models.BinaryField(max_length=32)
    hash = models.BinaryField(max_length=32)
    sealed_at = models.DateTimeField()

    class Meta:
        db_table = "audit_seal"
        constraints = [
            # No two links follow the same one: a chain cannot fork.
            models.UniqueConstraint(fields=["shard", "prev_hash"], name="audit_seal_does_not_fork"),
        ]

    def __str__(self) -> str:
        return f"seal {self.shard}/{self.seq}"
