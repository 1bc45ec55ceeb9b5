"""Who did what to which object."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from ledger.models.journals import CurrentTransaction, TransactionId


class AuditEvent(models.Model):
    """Append-only. Seals are kept beside it: a sealer walks each shard in id order, trailing `xact_id`."""

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
            models.Index(fields=["shard", "id"], name="audit_by_shard"),
        ]

    def __str__(self) -> str:
        return f"{self.action} by {self.actor}"
