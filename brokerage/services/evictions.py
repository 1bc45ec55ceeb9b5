"""Books what a provider announced: the node drains, the notice is kept, the reroute row exists."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import connection, transaction

from brokerage.models import EvictionNotice, Node
from brokerage.services.audit import record
from brokerage.services.nodes import UnknownNode, mark_draining
from kernel_steer.signals import CANCEL
from ledger.services import record_audit_event


@dataclass(frozen=True, slots=True)
class Booking:
    """What this call was the first to do."""

    drained: bool = False
    noticed: bool = False
    restored: bool = False


@transaction.atomic
def book_eviction(
    *, node: str, epoch: int, action: str, source: str, signal_at: datetime, deadline: datetime | None
) -> Booking:
    """Idempotent under duplicates, any order and concurrency. Times are aware. Raises UnknownNode.

    The action `cancel` takes back what the same source said before `signal_at` about this incarnation.
    """
    # The lock puts a notice and its cancellation in order, whichever task runs first.
    target = Node.objects.select_for_update().filter(name=node).first()
    if target is None:
        raise UnknownNode(node)
    if action == CANCEL:
        return _cancel(target, epoch, source, signal_at, deadline)
    cancelled = EvictionNotice.objects.filter(node=target, epoch=epoch, source=source, action=CANCEL)
    drained = False
    if not cancelled.filter(signal_at__gt=signal_at).exists():
        drained = mark_draining(node=target, epoch=epoch, reason=_reason(source, action))
    # Providers repeat a notice, some with a slightly other time at every poll: the minute identifies it.
    minute = (deadline or signal_at).astimezone(UTC).strftime("%Y-%m-%dT%H:%M")
    # After a cancellation the same words are news.
    round_ = cancelled.filter(signal_at__lt=signal_at).count()
    identity = f"{target.pk}|{action}|{minute}" + (f"|{epoch}|{round_}" if round_ else "")
    noticed = _keep_notice(target, epoch, action, source, signal_at, deadline, identity)
    _open_reroute(target, epoch, signal_at)
    return Booking(drained=drained, noticed=noticed)


def _cancel(node: Node, epoch: int, source: str, signal_at: datetime, deadline: datetime | None) -> Booking:
    identity = f"{node.pk}|{CANCEL}|{epoch}|{source}|{signal_at.astimezone(UTC).isoformat()}"
    if not _keep_notice(node, epoch, CANCEL, source, signal_at, deadline, identity):
        return Booking(noticed=False)
    newest: dict[str, EvictionNotice] = {}
    for notice in EvictionNotice.objects.filter(node=node, epoch=epoch).order_by("signal_at", "id"):
        newest[notice.source] = notice
    if any(notice.action != CANCEL for notice in newest.values()):
        return Booking(noticed=True)  # somebody still says that it goes
    # Staff may have drained it too, and then the reason is theirs.
    actions = EvictionNotice.objects.filter(node=node, epoch=epoch, source=source).values_list(
        "action", flat=True
    )
    reasons = [_reason(source, action) for action in actions]
    restored = Node.objects.filter(
        pk=node.pk, epoch=epoch, drained_epoch=epoch, state=Node.State.DRAINING, state_reason__in=reasons
    ).update(
        # Incarnations before this one stay drained.
        drained_epoch=epoch - 1,
        # The next heartbeat judges anew.
        state=Node.State.READY,
        state_reason="",
    )
    if restored:
        record("node.restored", subject=node, actor="system:node-worker", epoch=epoch, source=source)
    return Booking(noticed=True, restored=bool(restored))


def _reason(source: str, action: str) -> str:
    return f"{source}: {action}"


def _keep_notice(
    node: Node,
    epoch: int,
    action: str,
    source: str,
    signal_at: datetime,
    deadline: datetime | None,
    identity: str,
) -> bool:
    """False when a notice of the same identity is kept already."""
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()
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


def record_refused_signals(*, gateway: str, reason: str, carrier: str, count: int) -> None:
    """Somebody sent what a gateway did not believe; it sums up a few seconds in one report."""
    record_audit_event(
        actor="system:gateway",
        action="signal.refused",
        object_type="gateway",
        object_id=gateway,
        after={"reason": reason, "carrier": carrier, "count": count},
    )
