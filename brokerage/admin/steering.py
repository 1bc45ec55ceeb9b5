"""What providers announced, and how fast traffic was moved. Nobody edits either."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone

from brokerage.admin.base import ReadOnlyAdmin
from brokerage.admin.gateways import signals_heard
from brokerage.admin.wording import countdown, milliseconds
from brokerage.models import EvictionNotice, Reroute
from brokerage.selectors import (
    LATENCY_BOUNDS_MS,
    Latencies,
    open_notices,
    reroute_latencies,
    with_latencies,
    with_taken_back,
)
from kernel_steer.signals import CANCEL

STYLE = {"all": ["admin-steering.css"]}
# Percentiles sort what they are taken of; a page must not sort a year.
SUMMARY_ROWS = 10_000


def precise(moment: datetime) -> str:
    """To the millisecond, in UTC: minutes say nothing about a reroute."""
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"


class OpenFilter(admin.SimpleListFilter):
    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("open", "open"), ("closed", "gone, replaced or taken back")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[EvictionNotice]) -> QuerySet[EvictionNotice]:
        still_open = Q(pk__in=open_notices().order_by().values("pk"))
        return queryset.filter({"open": still_open, "closed": ~still_open}.get(self.value() or "", Q()))


@admin.register(EvictionNotice)
class EvictionNoticeAdmin(ReadOnlyAdmin):
    change_list_template = "admin/brokerage/explained_change_list.html"
    list_display = ["node", "action", "source", "deadline_at", "time_left", "said_at"]
    fields = ["node", "action", "source", "deadline_at", "time_left", "said_at", "booked_at", "epoch"]
    readonly_fields = ["deadline_at", "time_left", "said_at", "booked_at"]
    list_filter = [OpenFilter, "source", "action"]
    list_select_related = ["node"]
    search_fields = ["node__name"]
    ordering = ["-pk"]  # in the order of booking, by an index
    date_hierarchy = "created_at"
    empty_text = (
        "No notice yet. When a provider announces that it takes a node back, or a node is told to stop, "
        "it is listed here with its deadline."
    )

    class Media:
        css: ClassVar = STYLE

    def get_queryset(self, request: HttpRequest) -> QuerySet[EvictionNotice]:
        return with_taken_back(super().get_queryset(request))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        return super().changelist_view(request, {"empty_text": self.empty_text, **(extra_context or {})})

    @admin.display(description="deadline (UTC)", ordering="deadline")
    def deadline_at(self, notice: EvictionNotice) -> str:
        return f"{notice.deadline:%Y-%m-%d %H:%M:%S}" if notice.deadline else "none named"

    @admin.display(description="time left", ordering="deadline")
    def time_left(self, notice: EvictionNotice) -> str:
        if notice.action == CANCEL:
            return "—"
        if notice.taken_back:  # type: ignore[attr-defined]
            return "taken back"
        return countdown(notice.deadline, timezone.now()) if notice.deadline else "—"

    @admin.display(description="said at (UTC)", ordering="signal_at")
    def said_at(self, notice: EvictionNotice) -> str:
        return _dated(notice.signal_at)

    @admin.display(description="booked at (UTC)")
    def booked_at(self, notice: EvictionNotice) -> str:
        return _dated(notice.created_at)


@admin.register(Reroute)
class RerouteAdmin(ReadOnlyAdmin):
    change_list_template = "admin/brokerage/reroute/change_list.html"
    list_display = ["node", "signalled_at", "flip", "first_byte", "flows", "epoch"]
    fields = ["node", "signalled_at", "flip", "first_byte", "flows", "epoch"]
    readonly_fields = ["signalled_at", "flip", "first_byte"]
    list_filter = ["node__provider", "node__served_model"]
    list_select_related = ["node"]
    search_fields = ["node__name"]
    ordering = ["-pk"]
    date_hierarchy = "signal_at"
    empty_text = (
        "No reroute yet. When a node is evicted, its traffic is moved to another one, "
        "and how long that took is listed here."
    )

    class Media:
        css: ClassVar = {"all": ["vendor/uplot-1.6.32/uPlot.min.css", *STYLE["all"]]}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Reroute]:
        return with_latencies(super().get_queryset(request))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        response = super().changelist_view(request, {"empty_text": self.empty_text, **(extra_context or {})})
        # A wrong filter or an action answers with a redirect.
        if isinstance(response, TemplateResponse) and response.context_data and "cl" in response.context_data:
            listed = response.context_data["cl"]
            response.context_data |= signals_heard()
            if listed.result_count:
                response.context_data |= _summary(listed.queryset, listed.result_count)
        return response

    @admin.display(description="signal (UTC)", ordering="signal_at")
    def signalled_at(self, reroute: Reroute) -> str:
        return _dated(reroute.signal_at)

    @admin.display(description="signal to flip", ordering="flip_ms")
    def flip(self, reroute: Reroute) -> str:
        return _measured(reroute.flip_ms)  # type: ignore[attr-defined]

    @admin.display(description="signal to first byte", ordering="first_byte_ms")
    def first_byte(self, reroute: Reroute) -> str:
        return _measured(reroute.first_byte_ms)  # type: ignore[attr-defined]


def _dated(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d} {precise(moment)}"


def _measured(value: float | None) -> str:
    return "not yet" if value is None else milliseconds(value)


def _summary(filtered: QuerySet[Reroute], count: int) -> dict[str, Any]:
    """Figures and histogram of the filtered rows, or of the newest of them."""
    found = reroute_latencies(filtered.order_by("-pk")[:SUMMARY_ROWS])
    flips, first_bytes = found.flip.buckets, found.first_byte.buckets
    labels = [*(_bound(bound) for bound in LATENCY_BOUNDS_MS), "more"]
    return {
        "summary_rows": found.total,
        "summary_is_cut": count > SUMMARY_ROWS,
        "figures": [
            _figures("Flip", found.flip),
            _figures("First byte", found.first_byte),
        ],
        "histogram": {"labels": labels, "flip": flips, "first_byte": first_bytes},
        "histogram_rows": list(zip(labels, flips, first_bytes, strict=True)),
    }


def _bound(bound_ms: float) -> str:
    return f"{bound_ms:g} ms" if bound_ms < 1000 else f"{bound_ms / 1000:g} s"


def _figures(name: str, found: Latencies) -> dict[str, Any]:
    values = (found.p50_ms, found.p99_ms, found.max_ms)
    return {
        "name": name,
        "count": found.count,
        "values": ["—" if value is None else milliseconds(value) for value in values],
    }
