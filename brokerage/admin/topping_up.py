"""Low balances: what customers asked for, what was noticed and prepared. Changed by customers only."""

from __future__ import annotations

from django.contrib import admin

from brokerage.admin.base import ReadOnlyAdmin
from brokerage.models import LowBalanceNotice, LowBalanceRule, PreparedTopUp


@admin.register(LowBalanceRule)
class LowBalanceRuleAdmin(ReadOnlyAdmin):
    list_display = ["customer", "notice_below", "top_up_below", "top_up_amount", "monthly_cap"]
    list_select_related = ["customer"]
    search_fields = ["customer__name"]


@admin.register(LowBalanceNotice)
class LowBalanceNoticeAdmin(ReadOnlyAdmin):
    list_display = ["customer", "threshold", "available", "crossed_at", "mailed_at", "closed_at"]
    list_select_related = ["customer"]
    search_fields = ["customer__name"]


@admin.register(PreparedTopUp)
class PreparedTopUpAdmin(ReadOnlyAdmin):
    list_display = ["customer", "amount", "top_up", "created_at", "mailed_at", "closed_at"]
    list_select_related = ["customer", "top_up"]
    search_fields = ["customer__name"]
