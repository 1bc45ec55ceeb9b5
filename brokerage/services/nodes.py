"""Nodes as their workers report them: ready, draining, gone.

The state is a pure function of what is stored: an incarnation (`epoch`) drains for ever once
`drained_epoch` has reached it, and only a newer incarnation is ready again. So heartbeats, notices and
sweeps may arrive twice, late and in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Greatest, Now

from brokerage.models import Node, ServedModel
from brokerage.services import ports
from brokerage.services.audit import record
from kernel_steer.admission import REASONING

SILENCE = timedelta(seconds=15)
_WORKER = "system:node-worker"
# What the answers of two nodes must have in common to be one answer, in the words of a refusal.
_IDENTITY = {
    "revision": "model revision",
    "tokenizer_id": "tokenizer",
    "template_id": "chat template",
}
_REASON_CHARS = 300


class UnknownNode(LookupError):
    """Staff create nodes; a machine that nobody announced is not let in."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no node is named {name!r}: create it in the back office first")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a node worker says about itself. `epoch` is its start, ms since 1970. `trouble` says why it does not
    know what it serves."""

    name: str
    epoch: int
    host: str
    port: int
    model: str
    tokenizer_id: str
    slots: int
    healthy: bool
    engine: str = ""
    revision: str = ""
    template_id: str = ""
    capabilities: tuple[str, ...] = ()
    trouble: str = ""


@transaction.atomic
def record_heartbeat(*, heartbeat: Heartbeat) -> bool:
    """Stores address and health; True when the state of the node changed. Raises UnknownNode.

    A heartbeat of an older incarnation is ignored. A node that serves another model than its pool, or the same
    with other weights, tokenizer or template, could not continue an answer: it is refused, with the reason in
    `state_reason`.
    """
    beat = heartbeat
    node = Node.objects.select_related("served_model").filter(name=beat.name, upstream=None).first()
    if node is None:
        raise UnknownNode(beat.name)
    state, reason = _judge(node.served_model, beat)
    reported = {
        "epoch": beat.epoch,
        "host": beat.host,
        "port": beat.port,
        "tokenizer_id": beat.tokenizer_id,
        "slots": beat.slots,
        "engine": beat.engine,
        "revision": beat.revision,
        "template_id": beat.template_id,
        "capabilities": sorted(beat.capabilities),
    }
    this = Node.objects.filter(pk=node.pk)
    drained = Q(drained_epoch__gte=beat.epoch)
    # Nearly always nothing is new: one write of the time, no audit event.
    unchanged = Q(drained, state=Node.State.DRAINING) | Q(~drained, state=state, state_reason=reason)
    if this.filter(unchanged, **reported).update(last_seen_at=Now()):
        return False
    changed = this.filter(epoch__lte=beat.epoch).update(
        **reported,
        last_seen_at=Now(),
        state=Case(When(drained, then=Value(Node.State.DRAINING)), default=Value(state)),
        state_reason=Case(When(drained, then=F("state_reason")), default=Value(reason)),
    )
    if changed:
        node.refresh_from_db()
        record(
            "node.reported",
            subject=node,
            actor=_WORKER,
            epoch=node.epoch,
            state=node.state,
            why=node.state_reason,
        )
        if node.state == Node.State.READY:
            ports.fill_ports(served_model=node.served_model)
    return bool(changed)


def _judge(pool: ServedModel, beat: Heartbeat) -> tuple[Node.State, str]:
    """The state that the report alone asks for, and why when it is not ready."""
    if beat.model != pool.name:
        return Node.State.EXPECTED, f"refused: it serves {beat.model!r}, this pool is {pool.name!r}"
    known = beat.tokenizer_id or beat.capabilities
    if not beat.healthy and not known:
        return Node.State.EXPECTED, "starting: its inference server does not answer yet"
    if not beat.tokenizer_id and (not beat.capabilities or "ids" in beat.capabilities):
        reason = beat.trouble or "it names no tokenizer"
        return Node.State.EXPECTED, f"refused: {reason}"[:_REASON_CHARS]
    _decide(pool, beat)
    if differences := _differences(pool, beat):
        return Node.State.EXPECTED, f"refused: {'; '.join(differences)}"[:_REASON_CHARS]
    if not beat.healthy:
        return Node.State.GONE, "its inference server does not answer"
    return Node.State.READY, ""


def _decide(pool: ServedModel, beat: Heartbeat) -> None:
    """The first node of a pool decides what the pool is; of two at once, one does."""
    told = {name: getattr(beat, name) for name in _IDENTITY} | {"capabilities": sorted(beat.capabilities)}
    for name, value in told.items():
        if value and not getattr(pool, name):
            ServedModel.objects.filter(pk=pool.pk, **{name: type(value)()}).update(**{name: value})
    pool.refresh_from_db(fields=list(told))


def _differences(pool: ServedModel, beat: Heartbeat) -> list[str]:
    found = [
        f"its {what} {theirs[:12]}… is not the pool's {ours[:12]}…"
        for name, what in _IDENTITY.items()
        if (theirs := getattr(beat, name)) and theirs != (ours := getattr(pool, name))
    ]
    # An adapter of before does not say what it can do.
    # That a model reasons is no promise: gateways go by whichever node says so.
    if beat.capabilities and (missing := sorted(set(pool.capabilities) - {*beat.capabilities, REASONING})):
        found.append(f"its engine lacks what this pool promises: {', '.join(missing)}")
    return found


@transaction.atomic
def mark_draining(*, node: Node, epoch: int, reason: str, actor: User | str = _WORKER) -> bool:
    """No new requests for that incarnation; True when this call said so first.

    The epoch may be one that was never heard of (its heartbeat is still under way) or an old one
    (then the present incarnation is left alone).
    """
    first = Node.objects.filter(pk=node.pk, drained_epoch__lt=epoch).update(
        drained_epoch=Greatest(F("drained_epoch"), Value(epoch)),
        # A node that is gone stays gone until it reports.
        state=Case(
            When(
                epoch=epoch,
                state__in=[Node.State.EXPECTED, Node.State.READY],
                then=Value(Node.State.DRAINING),
            ),
            default=F("state"),
        ),
        state_reason=Case(When(epoch__lte=epoch, then=Value(reason)), default=F("state_reason")),
    )
    if first:
        record("node.draining", subject=node, actor=actor, epoch=epoch, why=reason)
        if Node.objects.filter(pk=node.pk, epoch__lte=epoch).exists():
            ports.leave_node(node=node)
    return bool(first)


@transaction.atomic
def sweep_lost_nodes(*, silence: timedelta = SILENCE) -> int:
    """Nodes that were silent for longer are gone; returns how many. By the database's clock."""
    lost = Q(
        state__in=[Node.State.READY, Node.State.DRAINING],
        last_seen_at__lt=Now() - Value(silence),
    )
    count = 0
    for node in Node.objects.filter(lost):
        # Again with the condition: a heartbeat may have come in between.
        gone = Node.objects.filter(lost, pk=node.pk).update(
            state=Node.State.GONE, state_reason=f"no heartbeat for {silence.total_seconds():g} s"
        )
        if gone:
            count += 1
            record("node.lost", subject=node, actor="system:sweep", epoch=node.epoch)
            ports.leave_node(node=node, actor="system:sweep")
    return count
