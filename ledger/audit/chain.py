"""Walks the sealed chains from their first link and stops at the first that does not hold.

The bytes are put together here, from the columns, so that the functions in the database are not believed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction

from ledger.audit.heads import Head, exported_heads

_PAGE = 5000
_GENESIS = bytes(32)

# Every column of the canonical bytes, as the text that was hashed.
_LINKS = """
SELECT s.seq, s.event_id, s.version, s.prev_hash, s.hash, s.xact_id::text, e.id IS NOT NULL,
       e.shard::text, e.id::text, e.xact_id::text, (extract(epoch FROM e.created_at) * 1000000)::bigint::text,
       e.actor, e.action, e.object_type, e.object_id, e.request_id, e.before::text, e.after::text
  FROM audit_seal s LEFT JOIN audit_events e ON e.id = s.event_id
 WHERE s.shard = %s AND s.seq > %s ORDER BY s.seq LIMIT %s
"""
# What lies before the head of its shard and has no seal was put there afterwards.
_SLIPPED_IN = """
SELECT e.id FROM audit_events e
 WHERE e.shard = %s AND (e.xact_id, e.id) <= (%s::xid8, %s)
   AND NOT EXISTS (SELECT 1 FROM audit_seal s WHERE s.event_id = e.id)
 ORDER BY e.xact_id, e.id LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """The first link that does not hold, and why.

    `kind`: event_changed, event_missing, event_unsealed, link_broken, link_missing, head_differs,
    truncated, unknown_version. `seq` is None for an event that has no link.
    """

    shard: int
    seq: int | None
    event_id: int | None
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`links` were walked and `heads` compared. `unsealed` events wait for the sealer, which is no fault."""

    ok: bool
    links: int
    heads: int
    unsealed: int
    fault: Fault | None


@dataclass(slots=True)
class _Walk:
    shard: int
    heads: dict[int, set[str]]
    seq: int = 0
    hash: bytes = _GENESIS
    xact_id: str = "0"
    event_id: int = 0


def verify_audit() -> AuditReport:
    """Verifies every shard on one snapshot, against the heads that were exported before it."""
    exported = exported_heads()
    with transaction.atomic(), connection.cursor() as cursor:
        if len(connection.savepoint_ids) == 0:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        cursor.execute("SELECT DISTINCT shard FROM audit_seal")
        shards = {shard for (shard,) in cursor.fetchall()} | {head.shard for head in exported}
        links, fault = 0, None
        for walk in (_Walk(shard, _heads_of(shard, exported)) for shard in sorted(shards)):
            fault = _walk(cursor, walk)
            links += walk.seq
            if fault is not None:
                break
        cursor.execute("SELECT (SELECT count(*) FROM audit_events) - (SELECT count(*) FROM audit_seal)")
        (unsealed,) = cursor.fetchone()
    return AuditReport(fault is None, links, len(set(exported)), max(0, unsealed), fault)


def _heads_of(shard: int, exported: list[Head]) -> dict[int, set[str]]:
    heads: dict[int, set[str]] = defaultdict(set)
    for head in exported:
        if head.shard == shard:
            heads[head.seq].add(head.hash)
    return heads


def _walk(cursor: Any, walk: _Walk) -> Fault | None:
    """Leaves `walk` at the last link that holds."""
    for row in _links(cursor, walk.shard):
        if found := _fault(walk, row):
            seq, event_id = row[:2]
            return Fault(walk.shard, seq, event_id, *found)
        walk.seq, walk.event_id, _, _, link_hash, walk.xact_id = row[:6]
        walk.hash = bytes(link_hash)
    if lost := [seq for seq in walk.heads if seq > walk.seq]:
        detail = f"a head was exported at link {max(lost)}, the chain ends at {walk.seq}"
        return Fault(walk.shard, walk.seq + 1, None, "truncated", detail)
    cursor.execute(_SLIPPED_IN, [walk.shard, walk.xact_id, walk.event_id])
    if (row := cursor.fetchone()) is not None:
        return Fault(walk.shard, None, row[0], "event_unsealed", "older than the head, but never sealed")
    return None


def _links(cursor: Any, shard: int) -> Iterator[tuple[Any, ...]]:
    seq = -(2**62)  # below any: a link before the first is a fault too
    while True:
        cursor.execute(_LINKS, [shard, seq, _PAGE])
        rows = cursor.fetchall()
        yield from rows
        if len(rows) < _PAGE:
            return
        seq = rows[-1][0]


def _fault(walk: _Walk, row: tuple[Any, ...]) -> tuple[str, str] | None:
    """What is wrong with a link: kind and detail."""
    seq, event_id, version, prev_hash, link_hash, xact_id, event_there, *columns = row
    if seq != walk.seq + 1:
        return "link_missing", f"link {walk.seq + 1} is not there, the next is {seq}"
    if bytes(prev_hash) != walk.hash:
        return "link_broken", f"does not follow link {walk.seq}"
    if version != 1:
        return "unknown_version", f"sealed in version {version}"
    if not event_there:
        return "event_missing", f"event {event_id} was sealed and is gone"
    shard, *rest = columns
    fields = ["apex.audit.1", shard, str(seq), *rest]
    expected = hashlib.sha256(walk.hash + "".join(map(_field, fields)).encode()).digest()
    if bytes(link_hash) != expected or xact_id != rest[1] or shard != str(walk.shard):
        return "event_changed", f"event {event_id} is not what was sealed"
    if walk.heads.get(seq, {expected.hex()}) != {expected.hex()}:
        return "head_differs", "another hash was exported for this link: the chain was written anew"
    return None


def _field(text: str | None) -> str:
    return "-," if text is None else f"{len(text.encode())}:{text},"
