"""Seals what was recorded. The work is done by audit_seal_events of ledger/sql/audit.sql."""

from __future__ import annotations

from typing import Any

from django.db import connection

# Links per transaction: a sealer that is killed loses at most that much work, and no link.
BATCH = 5000

# One index look-up per shard, however many events there are.
_SHARDS = """
WITH RECURSIVE found AS (
    SELECT min(shard) AS shard FROM audit_events
    UNION ALL
    SELECT (SELECT min(e.shard) FROM audit_events e WHERE e.shard > found.shard) FROM found WHERE shard IS NOT NULL
)
SELECT shard FROM found WHERE shard IS NOT NULL
"""


def seal_events() -> int:
    """Seals every event that is due, shard by shard; returns how many.

    May run twice at once and be killed anywhere: each batch is one transaction, and of two sealers of a
    shard the second leaves it to the first.
    """
    with connection.cursor() as cursor:
        cursor.execute(_SHARDS)
        return sum(_seal_shard(cursor, shard) for (shard,) in cursor.fetchall())


def _seal_shard(cursor: Any, shard: int) -> int:
    sealed = 0
    while True:
        cursor.execute("SELECT audit_seal_events(%s, %s)", [shard, BATCH])
        (links,) = cursor.fetchone()
        sealed += links
        if links < BATCH:
            return sealed
