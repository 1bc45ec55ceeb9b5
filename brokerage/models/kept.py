"""Answers under an Idempotency-Key, kept for a day. Written by admission/once.py."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from brokerage.models.customers import APIKey

# Of one HTTP answer, and of all of a key together (trimmed by a task, the oldest first).
ANSWER_BYTES_MAX = 4 << 20
KEY_BYTES_MAX = 256 << 20


class KeptAnswer(models.Model):
    """Under way while its gateway renews `lease_until`, finished with `finished_at`.

    `answer` is the HTTP answer as it was sent; a finished one without it was too long to keep.
    """

    api_key = models.ForeignKey(APIKey, on_delete=models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=255)
    request_hash = models.BinaryField(max_length=32)
    request_id = models.UUIDField(unique=True)
    lease_until = models.DateTimeField()
    answer = models.BinaryField(null=True)
    answer_bytes = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["api_key", "key"], name="kept_answer_once"),
            models.CheckConstraint(
                condition=Q(answer__isnull=True) | Q(finished_at__isnull=False),
                name="kept_answer_when_finished",
            ),
            models.CheckConstraint(
                condition=Q(answer_bytes__lte=ANSWER_BYTES_MAX), name="kept_answer_is_bounded"
            ),
        ]
        indexes = [models.Index(fields=["created_at"], name="kept_answer_by_age")]

    def __str__(self) -> str:
        return str(self.request_id)
