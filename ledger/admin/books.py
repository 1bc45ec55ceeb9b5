"""Journals, their legs and the audit trail. Corrections are new journals, never edits."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from ledger.admin.base import BooksAdmin, ReadOnlyInline, may
from ledger.models import AuditEvent, Entry, Hold, Journal, PeriodClose, Proposal
from ledger.money import format_money
from ledger.reports import balance_after


class LegInline(ReadOnlyInline):
    model = Entry
    fields = ["account", "exact_amount", "running"]
    readonly_fields = ["exact_amount", "running"]
    verbose_name_plural = "legs (above zero: credit)"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Entry]:
        return super().get_queryset(request).select_related("account")

    @admin.display(description="amount")
    def exact_amount(self, entry: Entry) -> str:
        return format_money(entry.amount)

    @admin.display(description="account's balance after it")
    def running(self, entry: Entry) -> str:
        return format_money(balance_after(entry))


@admin.register(Journal)
class JournalAdmin(BooksAdmin):
    change_form_template = "admin/ledger/journal_change_form.html"
    list_display = ["id", "kind", "currency", "effective_at", "actor", "idem_scope", "idem_key"]
    list_filter = ["kind", "currency"]
    search_fields = ["=idem_key", "=public_id"]
    raw_id_fields = ["reverses"]
    exclude = ["request_hash"]
    inlines = [LegInline]
    empty_text = "Nothing is booked yet. A purchase of credit is the first journal of most books."

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        extra = {"may_propose": may(request, "add", Proposal)}
        return super().change_view(request, object_id, form_url, {**extra, **(extra_context or {})})


@admin.register(Hold)
class HoldAdmin(BooksAdmin):
    list_display = ["id", "account", "exact_amount", "captured", "state", "expires_at", "key"]
    list_filter = ["state"]
    list_select_related = ["account"]
    search_fields = ["=key", "=account__code"]
    raw_id_fields = ["account", "journal"]
    empty_text = "No credit was set aside yet. Every answer holds what it may cost before it begins."


@admin.register(AuditEvent)
class AuditEventAdmin(BooksAdmin):
    list_display = ["id", "created_at", "actor", "action", "object_type", "object_id", "request_id"]
    search_fields = ["=actor", "=object_id", "=request_id", "=action"]
    empty_text = "Nobody has done anything yet that the trail keeps."


@admin.register(PeriodClose)
class PeriodCloseAdmin(BooksAdmin):
    change_list_template = "admin/ledger/period_change_list.html"
    list_display = ["closed_through", "closed_by", "created_at", "note"]
    empty_text = "No period is closed: a journal may be dated on any day of the past."

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        extra = {"may_propose": may(request, "add", Proposal)}
        return super().changelist_view(request, {**extra, **(extra_context or {})})
