"""Steered ports: opened and closed by staff, moved to other nodes when a node leaves."""

from __future__ import annotations

from collections.abc import Iterable

from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Count, F, Q, QuerySet

from brokerage.models import Customer, Node, ServedModel, SteeredPort, Upstream
from brokerage.services.audit import record

_OPEN = Q(state=SteeredPort.State.OPEN)


@transaction.atomic
def open_port(
    *,
    customer: Customer,
    name: str,
    number: int,
    served_model: ServedModel,
    actor: User | str,
    mode: SteeredPort.Mode = SteeredPort.Mode.HTTP,
    primary: Node | None = None,
    standby: Node | None = None,
    idle_ms: int = 200,
    connections_max: int = 1024,
) -> SteeredPort:
    """Nodes that are not named are chosen from the pool, now or as soon as one is ready.

    Raises ValidationError, keyed by field.
    """
    port = SteeredPort(
        customer=customer,
        name=name.strip(),
        number=number,
        mode=mode,
        served_model=served_model,
        primary=primary,
        standby=standby,
        idle_ms=idle_ms,
        connections_max=connections_max,
    )
    check_port(port)
    _fill(port)
    port.full_clean()
    port.save(force_insert=True)
    record(
        "steered_port.opened",
        subject=port,
        actor=actor,
        customer=str(customer.pk),
        name=port.name,
        port=number,
        mode=port.mode,
        pool=served_model.name,
        **_nodes(port),
    )
    return port


@transaction.atomic
def close_port(*, port: SteeredPort, actor: User | str) -> bool:
    """Cuts its connections. False when it was closed already."""
    closed = SteeredPort.objects.filter(_OPEN, pk=port.pk).update(state=SteeredPort.State.CLOSED)
    if closed:
        port.refresh_from_db()
        record("steered_port.closed", subject=port, actor=actor, port=port.number)
    return bool(closed)


@transaction.atomic
def retarget_port(
    *, port: SteeredPort, primary: Node | None, standby: Node | None, actor: User | str
) -> bool:
    """Other nodes. Responses under way stay whole; with none named the pool's best are taken.

    True when something changed. Raises ValidationError, keyed by field.
    """
    stored = SteeredPort.objects.select_for_update(no_key=True).filter(_OPEN, pk=port.pk).first()
    if stored is None:
        raise ValidationError("This port is closed: open another one.")
    before = stored.primary_id, stored.standby_id
    stored.primary, stored.standby = primary, standby
    check_port(stored)
    _fill(stored)
    stored.full_clean()
    if (stored.primary_id, stored.standby_id) == before:
        return False
    _store_nodes(stored, actor)
    return True


@transaction.atomic
def leave_node(*, node: Node, actor: str = "system:node-worker") -> int:
    """The node goes away: what stood by serves, and another node stands by. Returns how many ports moved."""
    return _move(
        SteeredPort.objects.filter(_OPEN, Q(primary=node) | Q(standby=node)), without=node, actor=actor
    )


@transaction.atomic
def fill_ports(*, served_model: ServedModel, actor: str = "system:node-worker") -> int:
    """A node of the pool has become ready: ports that lack one get it. Returns how many did."""
    missing = Q(primary=None) | Q(standby=None)
    return _move(SteeredPort.objects.filter(_OPEN, missing, served_model=served_model), actor=actor)


def _move(ports: QuerySet[SteeredPort], *, actor: str, without: Node | None = None) -> int:
    moved = 0
    # In order, so that two who do this at once do not wait for each other.
    for port in ports.order_by("pk").select_for_update(no_key=True):
        before = port.primary_id, port.standby_id
        if without is not None:
            if port.standby_id == without.pk:
                port.standby = None
            if port.primary_id == without.pk:
                port.primary, port.standby = port.standby, None
        _fill(port, without=without)
        # Better a node that is leaving than none at all: it may serve until its last moment.
        if port.primary_id is None:
            port.primary = without
        if (port.primary_id, port.standby_id) != before:
            _store_nodes(port, actor)
            moved += 1
    return moved


def _store_nodes(port: SteeredPort, actor: User | str) -> None:
    port.save(update_fields=["primary", "standby"])
    record("steered_port.retargeted", subject=port, actor=actor, **_nodes(port))


def _nodes(port: SteeredPort) -> dict[str, str | None]:
    return {
        "primary": port.primary.name if port.primary else None,
        "standby": port.standby.name if port.standby else None,
    }


def _fill(port: SteeredPort, *, without: Node | None = None) -> None:
    """Chooses the nodes that are missing, the ones with the fewest ports first."""
    taken = [node for node in (port.primary, port.standby, without) if node is not None]
    found = iter(_candidates(port.served_model, taken))
    if port.primary is None:
        port.primary, port.standby = port.standby or next(found, None), None
    if port.primary is not None and port.standby is None:
        port.standby = next(found, None)


def _candidates(served_model: ServedModel, taken: Iterable[Node]) -> QuerySet[Node]:
    # A third party's API is no machine that a connection could be led to.
    ready = Q(state=Node.State.READY, epoch__gt=F("drained_epoch"), upstream=None)
    open_ones = SteeredPort.objects.filter(_OPEN).values_list("primary_id", "standby_id")
    busy = [pk for pair in open_ones for pk in pair if pk is not None]
    nodes = Node.objects.filter(ready, served_model=served_model).exclude(pk__in=[node.pk for node in taken])
    return nodes.annotate(uses=Count("pk", filter=Q(pk__in=busy))).order_by("uses", "name")


def check_port(port: SteeredPort) -> None:
    """What the database does not know. Raises ValidationError, keyed by field."""
    errors: dict[str, str] = {}
    low, high = settings.STEERED_PORTS
    if not low <= port.number <= high:
        errors["number"] = f"Take a port from {low} to {high} (APEX_STEERED_PORTS)."
    for field, node in (("primary", port.primary), ("standby", port.standby)):
        if node is not None and node.served_model_id != port.served_model_id:
            errors[field] = f"{node} is not in the pool {port.served_model}: take one of its nodes."
        elif node is not None and Upstream.objects.filter(node=node).exists():
            errors[field] = f"{node} is a third party's API, no machine that a port could lead to."
    if port.standby is not None and port.standby_id == port.primary_id:
        errors["standby"] = "The standby has to be another node than the primary."
    if errors:
        raise ValidationError(errors)
