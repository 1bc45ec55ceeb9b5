"""Keeps the store of answers under Idempotency-Keys within its bounds."""

from __future__ import annotations

from datetime import timedelta

from django.db import connection
from django.utils import timezone

from brokerage.models import KeptAnswer
from brokerage.models.kept import KEY_BYTES_MAX

KEPT_FOR = timedelta(hours=24)


def forget_kept_answers(*, key_bytes_max: int = KEY_BYTES_MAX) -> tuple[int, int]:
    """How many rows were over a day old and are gone, and how many newer ones lost their answer because
    their API key has more than `key_bytes_max` stored: those are refused when asked again, never charged twice."""
    forgotten, _ = KeptAnswer.objects.filter(created_at__lt=timezone.now() - KEPT_FOR).delete()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE brokerage_keptanswer k SET answer = NULL, answer_bytes = 0"
            "  FROM (SELECT id, sum(answer_bytes) OVER (PARTITION BY api_key_id"
            "               ORDER BY finished_at DESC, id DESC) AS bytes"
            "          FROM brokerage_keptanswer WHERE answer IS NOT NULL) s"
            " WHERE k.id = s.id AND s.bytes > %s",
            [key_bytes_max],
        )
        return forgotten, cursor.rowcount
