"""Nodes, and on the page of a node what became of it when it was evicted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.utils import timezone

from brokerage.admin.base import AddOnlyAdmin, staff
from brokerage.admin.steering import STYLE, precise
from brokerage.admin.wording import ago, countdown, offset
from brokerage.models import EvictionNotice, Node
from brokerage.selectors import Eviction, last_evictions, open_notices
from brokerage.services import catalogue, nodes


class HeardOfFilter(admin.SimpleListFilter):
    """By the last heartbeat, which is newer than the state: the sweep runs every few seconds."""

    title = "heartbeat"
    parameter_name = "heard"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        seconds = f"{nodes.SILENCE.total_seconds():g} s"
        return [("now", f"in the last {seconds}"), ("silent", f"silent for {seconds}"), ("never", "never")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Node]) -> QuerySet[Node]:
        wanted = {
            "now": Q(last_seen_at__gte=Now() - nodes.SILENCE),
            "silent": Q(last_seen_at__lt=Now() - nodes.SILENCE),
            "never": Q(last_seen_at=None),
        }
        return queryset.filter(wanted.get(self.value() or "", Q()))


class NoticeFilter(admin.SimpleListFilter):
    title = "open notice"
    parameter_name = "notice"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("open", "leaving"), ("none", "staying")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Node]) -> QuerySet[Node]:
        leaving = Q(pk__in=open_notices().order_by().values("node"))
        return queryset.filter({"open": leaving, "none": ~leaving}.get(self.value() or "", Q()))


@admin.register(Node)
class NodeAdmin(AddOnlyAdmin):
    change_list_template = "admin/brokerage/explained_change_list.html"
    change_form_template = "admin/brokerage/node/change_form.html"
    list_display = ["name", "served_model", "state", "state_reason", "last_seen", "provider", "zone"]
    list_filter = ["state", HeardOfFilter, NoticeFilter, "provider", "served_model"]
    show_facets = admin.ShowFacets.ALWAYS
    list_select_related = ["served_model"]
    search_fields = ["name", "zone"]
    actions = ["drain"]
    empty_text = (
        "No node yet. Add one here, then start its worker with the same name: "
        "it appears as ready with its first heartbeat."
    )

    class Media:
        css: ClassVar = STYLE

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        asked = ["name", "served_model", "provider", "zone", "hourly_rate"]
        if obj is None:
            return [(None, {"fields": asked})]
        return [
            ("State", {"fields": ["state", "state_reason", "last_seen", "incarnation"]}),
            # Closed, so that what happens to the node is on the first screen.
            (
                "Machine",
                {
                    "fields": [
                        *asked,
                        "slots",
                        "host",
                        "port",
                        "engine",
                        "revision",
                        "tokenizer_id",
                        "template_id",
                        "capabilities",
                    ],
                    "classes": ["collapse"],
                },
            ),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return [] if obj is None else ["last_seen", "incarnation"]

    @admin.display(description="last seen", ordering="last_seen_at")
    def last_seen(self, node: Node) -> str:
        return ago(node.last_seen_at, timezone.now()) if node.last_seen_at else "never"

    @admin.display(description="epoch")
    def incarnation(self, node: Node) -> str:
        """The epoch is the start of its worker in ms since 1970, so it can be told as a time."""
        return f"{node.epoch} (started {_start(node.epoch)})" if node.epoch else "not heard of yet"

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        return super().changelist_view(request, {"empty_text": self.empty_text, **(extra_context or {})})

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Node | None = None,
    ) -> HttpResponse:
        if obj is not None:
            now = timezone.now()
            context["evictions"] = [_as_timeline(eviction, obj) for eviction in last_evictions(obj)]
            context["open_notices"] = [
                {"notice": notice, "countdown": notice.deadline and countdown(notice.deadline, now)}
                for notice in open_notices(EvictionNotice.objects.filter(node=obj)).order_by("-signal_at")[
                    :20
                ]
            ]
        return super().render_change_form(request, context, add, change, form_url, obj)

    def save_model(self, request: HttpRequest, obj: Node, form: Any, change: bool) -> None:
        node = catalogue.register_node(
            name=obj.name,
            served_model=obj.served_model,
            provider=obj.provider,
            zone=obj.zone,
            hourly_rate=obj.hourly_rate,
            actor=staff(request),
        )
        obj.pk = node.pk

    @admin.action(
        description="Drain: no new requests until its worker is started anew", permissions=["operate"]
    )
    def drain(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        who = staff(request)
        reason = f"drained by {who.get_username()}"
        done = sum(
            nodes.mark_draining(node=node, epoch=node.epoch, reason=reason, actor=who) for node in queryset
        )
        self.message_user(request, f"{done} told to drain.", messages.SUCCESS)


def _start(epoch: int) -> str:
    return f"{datetime.fromtimestamp(epoch / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _as_timeline(eviction: Eviction, node: Node) -> dict[str, Any]:
    """The five steps with what is to be said of each; a step that has not happened says so."""

    def step(
        name: str, moment: datetime | None, detail: str = "", missing: str = "not yet"
    ) -> dict[str, Any]:
        since = eviction.after(moment)
        when = missing if since is None else offset(since)
        return {"name": name, "when": when, "detail": detail, "pending": since is None}

    first = eviction.notices[0] if eviction.notices else None
    said = ", ".join(dict.fromkeys(f"{notice.source}: {notice.action}" for notice in eviction.notices))
    replaced = "started anew" if node.epoch > eviction.epoch else "not yet"
    return {
        "title": f"{eviction.signal_at:%Y-%m-%d %H:%M:%S} UTC",
        "epoch": eviction.epoch,
        "steps": [
            {
                "name": "Notice",
                "when": said or "not booked yet",
                "detail": f"booked {offset(first.created_at - eviction.signal_at)}" if first else "",
            },
            {"name": "Signal", "when": precise(eviction.signal_at), "detail": "the clock starts here"},
            step("Flip", eviction.flipped_at, _answers(eviction.flows) if eviction.flipped_at else ""),
            step("First byte", eviction.first_byte_at, "of the next answer"),
            step("Gone", eviction.gone_at, missing=replaced),
        ],
    }


def _answers(count: int) -> str:
    return f"{count} open answer{'' if count == 1 else 's'} moved"
