"""Tables of the site itself."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class IdempotentRequest(models.Model):
    """A POST that was answered, or is being answered, under an Idempotency-Key.

    The row is inserted before the work starts: the unique constraint is the lock. `status` and
    `response` are set together, once the work is done.
    """

    scope = models.CharField(max_length=100, help_text="Who called: key:ID or user:ID.")
    method = models.CharField(max_length=10)
    path = models.CharField(max_length=200)
    key = models.CharField(max_length=255)
    request_hash = models.BinaryField(max_length=32)
    status = models.PositiveSmallIntegerField(null=True)
    response = models.JSONField(null=True)
    locked_at = models.DateTimeField(db_default=Now())
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "idempotent_request"
        constraints = [
            models.UniqueConstraint(
                fields=["scope", "method", "path", "key"], name="idempotent_request_once"
            ),
            models.CheckConstraint(
                condition=Q(status__isnull=True, response__isnull=True) | Q(status__isnull=False),
                name="idempotent_response_with_status",
            ),
        ]
        indexes = [models.Index(fields=["created_at"], name="idempotent_request_age")]

    def __str__(self) -> str:
        return f"{self.method} {self.path} by {self.scope}"


class HealthProbe(models.Model):
    """Always empty: the health matrix writes a row, reads it back and rolls it back."""

    token = models.UUIDField(primary_key=True)

    class Meta:
        db_table = "health_probe"

    def __str__(self) -> str:
        return str(self.token)
