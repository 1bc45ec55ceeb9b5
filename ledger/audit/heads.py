"""The heads of the chains, carried out of the database: who rewrites a chain cannot rewrite these.

`heads.json` names the newest head of each shard, `heads-YYYY-MM-DD.jsonl` every one that was seen, and the
log has the same lines. Copying folder or log to another machine is what makes them evidence.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from django.conf import settings
from django.db import connection

logger = logging.getLogger("ledger.audit")

_NEWEST = "heads.json"
# From the last shard to the first, one index look-up each.
_HEADS = """
WITH RECURSIVE head AS (
    (SELECT shard, seq, hash, event_id FROM audit_seal ORDER BY shard DESC, seq DESC LIMIT 1)
    UNION ALL
    SELECT l.* FROM head, LATERAL (
        SELECT s.shard, s.seq, s.hash, s.event_id FROM audit_seal s
         WHERE s.shard < head.shard ORDER BY s.shard DESC, s.seq DESC LIMIT 1) l
)
SELECT shard, seq, encode(hash, 'hex'), event_id FROM head ORDER BY shard
"""


@dataclass(frozen=True, slots=True)
class Head:
    """The last link of a shard at some time; `hash` in hexadecimal."""

    shard: int
    seq: int
    hash: str
    event_id: int


def heads_folder() -> Path:
    return settings.VAR_DIR / "audit"


def current_heads() -> list[Head]:
    with connection.cursor() as cursor:
        cursor.execute(_HEADS)
        return [Head(*row) for row in cursor.fetchall()]


def export_heads() -> list[Head]:
    """Writes and logs the heads that the folder does not have yet; returns them.

    The line is on the disk before `heads.json` says so: after a crash in between it is written again.
    """
    folder = heads_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    newest = folder / _NEWEST
    known = set(_read_newest(newest))
    heads = current_heads()
    fresh = [head for head in heads if head not in known]
    if fresh:
        now = datetime.now(UTC)
        lines = "".join(json.dumps({**asdict(head), "exported_at": now.isoformat()}) + "\n" for head in fresh)
        _append(folder / f"heads-{now:%Y-%m-%d}.jsonl", lines)
        _replace(newest, heads)
        for head in fresh:
            logger.info("audit head shard=%d seq=%d hash=%s", head.shard, head.seq, head.hash)
    return fresh


def exported_heads() -> list[Head]:
    """Every head in the folder."""
    folder = heads_folder()
    heads = _read_newest(folder / _NEWEST)
    for path in sorted(folder.glob("heads-*.jsonl")):
        heads += _read_lines(path)
    return heads


def _read_lines(path: Path) -> Iterator[Head]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                yield _head(json.loads(line))
            except ValueError:
                # A crash cut it short; the head is in heads.json or in a later line.
                logger.warning("audit heads: line %d of %s is left out", number, path.name)


def _read_newest(path: Path) -> list[Head]:
    try:
        return [_head(row) for row in json.loads(path.read_text())]
    except FileNotFoundError:
        return []


def _head(row: dict) -> Head:
    return Head(row["shard"], row["seq"], row["hash"], row["event_id"])


def _append(path: Path, text: str) -> None:
    # One write: lines of two workers do not mix.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, text.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, heads: Sequence[Head]) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps([asdict(head) for head in heads]))
    draft.replace(path)
