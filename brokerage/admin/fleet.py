"""Nodes, notices and reroutes."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from brokerage.admin.base import AddOnlyAdmin, ReadOnlyAdmin, staff
from brokerage.models import EvictionNotice, Node, Reroute
from brokerage.services import catalogue, nodes


@admin.register(Node)
class NodeAdmin(AddOnlyAdmin):
    list_display = [
        "name",
        "served_model",
        "state",
        "state_reason",
        "last_seen_at",
        "provider",
        "zone",
        "slots",
    ]
    list_filter = ["state", "provider", "served_model"]
    list_select_related = ["served_model"]
    search_fields = ["name"]
    actions = ["drain"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        asked = ["name", "served_model", "provider", "zone", "hourly_rate"]
        reported = ["state", "state_reason", "epoch", "host", "port", "tokenizer_id", "slots", "last_seen_at"]
        return asked if obj is None else asked + reported

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


@admin.register(EvictionNotice)
class EvictionNoticeAdmin(ReadOnlyAdmin):
    list_display = ["node", "action", "source", "deadline", "signal_at", "created_at"]
    list_filter = ["source", "action"]
    list_select_related = ["node"]
    search_fields = ["node__name"]


@admin.register(Reroute)
class RerouteAdmin(ReadOnlyAdmin):
    list_display = ["node", "signal_at", "flipped_after", "first_byte_after", "flows"]
    list_select_related = ["node"]
    search_fields = ["node__name"]

    @admin.display(description="flipped after", empty_value="not yet")
    def flipped_after(self, reroute: Reroute) -> str | None:
        return _milliseconds(reroute.signal_at, reroute.flipped_at)

    @admin.display(description="next answer after", empty_value="not yet")
    def first_byte_after(self, reroute: Reroute) -> str | None:
        return _milliseconds(reroute.signal_at, reroute.first_byte_at)


def _milliseconds(start: Any, end: Any) -> str | None:
    return None if end is None else f"{(end - start).total_seconds() * 1000:.1f} ms"
