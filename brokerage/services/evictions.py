"""Books what a provider announced: the node drains, the notice is kept, the reroute row exists."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import connection, transaction

from brokerage.models import EvictionNotice, Node
from brokerage.services.audit import record
from brokerage.services.nodes import UnknownNode, mark_draining


@dataclass(frozen=True, slots=True)
class Booking:
    """What this call was the first to do."""

    drained: bool
    noticed: bool


@transaction.atomic
def book_eviction(
    *, node: str, epoch: int, action: str, source: str, signal_at: datetime, deadline: datetime | None
) -> Booking:
    """Idempotent under duplicates, any order and concurrency. Times are aware. Raises UnknownNode."""
    target = Node.objects.filter(name=node).first()
    if target is None:
        raise UnknownNode(node)
    drained = mark_draining(node=target, epoch=epoch, reason=f"{source}: {action}")
    noticed = _keep_notice(target, epoch, action, source, signal_at, deadline)
    _open_reroute(target, epoch, signal_at)
    return Booking(drained, noticed)


def _keep_notice(
    node: Node, epoch: int, action: str, source: str, signal_at: datetime, deadline: datetime | None
) -> bool:
    # Providers repeat a notice, some with a slightly other time at every poll: the minute identifies it.
    minute = (deadline or signal_at).astimezone(UTC).strftime("%Y-%m-%dT%H:%M")
    fingerprint = hashlib.sha256(f"{node.pk}|{action}|{minute}".encode()).hexdigest()
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {EvictionNotice._meta.db_table}"  # noqa: S608
            " (node_id, epoch, source, action, deadline, fingerprint, signal_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (fingerprint) DO NOTHING",
            [node.pk, epoch, source, action, deadline, fingerprint, signal_at],
        )
        first = cursor.rowcount == 1
    if first:
        record(
            "node.eviction_notice",
            subject=node,
            actor="system:node-worker",
            epoch=epoch,
            source=source,
            notice=action,
            deadline=deadline.isoformat() if deadline else None,
        )
    return first


def _open_reroute(node: Node, epoch: int, signal_at: datetime) -> None:
    # The gateway may have reported its flip before; the earliest signal is the one that counts.
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO reroute (node_id, epoch, signal_at, flows) VALUES (%s, %s, %s, 0)"
            " ON CONFLICT (node_id, epoch)"
            " DO UPDATE SET signal_at = LEAST(reroute.signal_at, EXCLUDED.signal_at)",
            [node.pk, epoch, signal_at],
        )
