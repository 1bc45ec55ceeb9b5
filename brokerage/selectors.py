"""Reads about the fleet: what is announced, how fast traffic was moved, what became of a node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from django.db.models import (
    Aggregate,
    Count,
    DurationField,
    Exists,
    ExpressionWrapper,
    F,
    FloatField,
    Func,
    Max,
    OuterRef,
    Q,
    QuerySet,
    Sum,
)

from brokerage.models import EvictionNotice, Node, Reroute
from kernel_steer.signals import CANCEL
from ledger.models import AuditEvent

# Upper bounds, inclusive, as Prometheus has them. A flip takes microseconds, an eviction's grace 30 s.
LATENCY_BOUNDS_MS = (
    0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Latencies:
    """A distribution in ms. Percentiles are by nearest rank: values that were really measured.

    `cumulative[i]` counts what took at most `LATENCY_BOUNDS_MS[i]`. Times come from two machines' clocks,
    so a value may be below zero; it counts in the first bucket.
    """

    count: int
    sum_ms: float
    cumulative: tuple[int, ...]
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None

    @property
    def buckets(self) -> list[int]:
        """How many fell into each bucket, the last one being above every bound."""
        edges = (0, *self.cumulative, self.count)
        return [high - low for low, high in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class RerouteLatencies:
    """Of `total` reroutes; what was not measured is missing from the distributions."""

    total: int
    flip: Latencies
    first_byte: Latencies


class _NearestRank(Aggregate):
    """A percentile that occurs among the values; `fraction` is a literal of ours."""

    template = "percentile_disc(%(fraction)s) WITHIN GROUP (ORDER BY %(expressions)s)"
    output_field = FloatField()


def _milliseconds_since_signal(field: str) -> Func:
    return Func(
        ExpressionWrapper(F(field) - F("signal_at"), output_field=DurationField()),
        template="(date_part('epoch', %(expressions)s) * 1000)",
        output_field=FloatField(),
    )


def with_latencies(reroutes: QuerySet[Any]) -> QuerySet[Any]:
    """Adds `flip_ms` and `first_byte_ms`, both since the signal; None while it has not happened."""
    return reroutes.annotate(
        flip_ms=_milliseconds_since_signal("flipped_at"),
        first_byte_ms=_milliseconds_since_signal("first_byte_at"),
    )


def reroute_latencies(reroutes: QuerySet[Any] | None = None, *, percentiles: bool = True) -> RerouteLatencies:
    """How long it took since the signal, of the given reroutes or of all of them. One query.

    `reroutes` comes from `with_latencies`. Percentiles sort the rows, so give a slice where there may be many.
    """
    if reroutes is None:
        reroutes = with_latencies(Reroute.objects.order_by())
    wanted: dict[str, Any] = {"total": Count("pk")}
    for name, moment in (("flip_ms", "flipped_at"), ("first_byte_ms", "first_byte_at")):
        wanted[f"{name}_count"] = Count(name)
        wanted[f"{name}_sum"] = Sum(name, default=0.0)
        for number, bound in enumerate(LATENCY_BOUNDS_MS):
            # Times are compared as they are stored: exact, and four times as fast as by milliseconds.
            within = {f"{moment}__lte": F("signal_at") + timedelta(milliseconds=bound)}
            wanted[f"{name}_{number}"] = Count("pk", filter=Q(**within))
        if percentiles:
            wanted[f"{name}_p50"] = _NearestRank(name, fraction=0.5)
            wanted[f"{name}_p99"] = _NearestRank(name, fraction=0.99)
            wanted[f"{name}_max"] = Max(name)
    found = reroutes.aggregate(**wanted)
    flip, first_byte = (
        Latencies(
            count=found[f"{name}_count"],
            sum_ms=found[f"{name}_sum"],
            cumulative=tuple(found[f"{name}_{number}"] for number in range(len(LATENCY_BOUNDS_MS))),
            p50_ms=found.get(f"{name}_p50"),
            p99_ms=found.get(f"{name}_p99"),
            max_ms=found.get(f"{name}_max"),
        )
        for name in ("flip_ms", "first_byte_ms")
    )
    return RerouteLatencies(found["total"], flip, first_byte)


def with_taken_back(notices: QuerySet[EvictionNotice]) -> QuerySet[EvictionNotice]:
    """Adds `taken_back`: the same source cancelled later what it said about that incarnation."""
    later = EvictionNotice.objects.filter(
        node=OuterRef("node"),
        epoch=OuterRef("epoch"),
        source=OuterRef("source"),
        action=CANCEL,
        signal_at__gt=OuterRef("signal_at"),
    )
    return notices.annotate(taken_back=Exists(later))


def open_notices(notices: QuerySet[EvictionNotice] | None = None) -> QuerySet[EvictionNotice]:
    """What is announced and has not come to pass: about the incarnation that runs, and not taken back."""
    if notices is None:
        notices = EvictionNotice.objects.all()
    # An epoch above the node's is a new incarnation whose heartbeat is still under way.
    return (
        with_taken_back(notices.filter(epoch__gte=F("node__epoch")))
        .exclude(Q(taken_back=True) | Q(action=CANCEL))
        .exclude(node__state=Node.State.GONE)
    )


@dataclass(frozen=True, slots=True)
class Eviction:
    """What became of one incarnation, in the order in which it should happen. Times are None until then."""

    epoch: int
    notices: Sequence[EvictionNotice]
    signal_at: datetime
    flipped_at: datetime | None
    first_byte_at: datetime | None
    gone_at: datetime | None
    flows: int

    def after(self, moment: datetime | None) -> timedelta | None:
        """Since the signal."""
        return None if moment is None else moment - self.signal_at


def last_evictions(node: Node, *, limit: int = 5) -> list[Eviction]:
    """The newest evictions of a node, newest first. Three queries, however many there are."""
    reroutes = list(node.reroutes.order_by("-epoch")[:limit])
    epochs = [reroute.epoch for reroute in reroutes]
    notices: dict[int, list[EvictionNotice]] = defaultdict(list)
    for notice in node.notices.filter(epoch__in=epochs).order_by("signal_at", "id"):
        notices[notice.epoch].append(notice)
    gone = _gone_moments(node, epochs)
    return [
        Eviction(
            epoch=reroute.epoch,
            notices=notices[reroute.epoch],
            signal_at=reroute.signal_at,
            flipped_at=reroute.flipped_at,
            first_byte_at=reroute.first_byte_at,
            gone_at=next((at for at in gone[reroute.epoch] if at >= reroute.signal_at), None),
            flows=reroute.flows,
        )
        for reroute in reroutes
    ]


def _gone_moments(node: Node, epochs: Sequence[int]) -> dict[int, list[datetime]]:
    """When each incarnation was found to be gone, from the audit trail: the node's row knows its present only."""
    lost = Q(action="node.lost") | Q(action="node.reported", after__state=Node.State.GONE)
    events = AuditEvent.objects.filter(
        lost, object_type="node", object_id=str(node.pk), after__epoch__in=list(epochs)
    )
    moments: dict[int, list[datetime]] = defaultdict(list)
    for epoch, created_at in events.order_by("id").values_list("after__epoch", "created_at"):
        moments[epoch].append(created_at)
    return moments
