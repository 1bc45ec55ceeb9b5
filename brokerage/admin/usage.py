"""What was delivered and charged. Nobody edits it."""

from __future__ import annotations

from django.contrib import admin

from brokerage.admin.base import ReadOnlyAdmin, ReadOnlyInline
from brokerage.models import LegCost, UsageEvent


class LegCostInline(ReadOnlyInline):
    model = LegCost
    fields = ["number", "node", "prompt_tokens", "completion_tokens", "ended"]
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
