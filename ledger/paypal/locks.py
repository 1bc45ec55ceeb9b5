"""The lock that everything about one capture takes first, in Python as in SQL (ledger_lock_capture)."""

from __future__ import annotations

from django.db import connection


def lock_capture(*, provider: str, capture_id: str) -> None:
    """Held until the end of the transaction; may be taken again."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(%s || ' ' || %s, 1))", [provider, capture_id]
        )
