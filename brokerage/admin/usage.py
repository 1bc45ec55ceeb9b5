"""What was delivered and charged. Nobody edits it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.http import HttpRequest

from brokerage.admin.base import ReadOnlyAdmin, ReadOnlyInline
from brokerage.admin.steering import STYLE
from brokerage.losses import losses_by_provider
from brokerage.models import LegCost, UsageEvent


class LegCostInline(ReadOnlyInline):
    model = LegCost
    fields = ["number", "node", "prompt_tokens", "completion_tokens", "ended", "lost_tokens", "lost_to"]
    verbose_name_plural = "legs: what it cost the platform"


@admin.register(UsageEvent)
class UsageEventAdmin(ReadOnlyAdmin):
    list_display = [
        "request_id",
        "customer",
        "served_model",
        "outcome",
        "prompt_tokens",
        "completion_tokens",
        "amount",
        "currency",
        "finished_at",
    ]
    list_filter = ["outcome", ("charged_at", admin.EmptyFieldListFilter), "served_model"]
    list_select_related = ["customer", "served_model"]
    search_fields = ["request_id__exact", "customer__name"]
    inlines = [LegCostInline]


@admin.register(LegCost)
class LegCostAdmin(ReadOnlyAdmin):
    """What each node did, and above it what the going of nodes has cost."""

    change_list_template = "admin/brokerage/legcost/change_list.html"
    list_display = [
        "usage", "number", "node", "ended", "prompt_tokens", "completion_tokens", "lost_tokens", "lost_to",
    ]  # fmt: skip
    list_filter = ["ended"]
    list_select_related = ["usage"]
    search_fields = ["node__exact", "lost_to__exact", "usage__request_id__exact"]
    ordering = ["-pk"]
    empty_text = (
        "No answer yet. What each node did for an answer is listed here, and what was lost with nodes."
    )

    class Media:
        css: ClassVar = STYLE

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        more = {"empty_text": self.empty_text, "losses": losses_by_provider(timedelta(days=30))}
        return super().changelist_view(request, more | (extra_context or {}))
