"""The books in the back office, for reading. Corrections are new journals, never edits."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin import EmptyFieldListFilter
from django.db.models import DecimalField, F, OuterRef, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from paypal.standard.ipn import admin as _registers_its_own  # noqa: F401
from paypal.standard.ipn.models import PayPalIPN

from ledger.models import (
    Account,
    AuditEvent,
    Difference,
    Dispute,
    Entry,
    Hold,
    InboundEvent,
    Journal,
    ParkedRefund,
    Payout,
    PeriodClose,
    Reconciliation,
    Refund,
    Settlement,
    TopUp,
)
from ledger.money import format_money


class ReadOnly:
    """Nobody adds, changes or deletes, whatever their permissions."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class BooksAdmin(ReadOnly, admin.ModelAdmin):
    """No COUNT(*) over long tables, no query for each row."""

    show_full_result_count = False
    list_per_page = 50
    actions = None

    @admin.display(description="amount", ordering="amount")
    def exact_amount(self, row: Any) -> str:
        return format_money(row.amount)


class LegInline(ReadOnly, admin.TabularInline):
    model = Entry
    fields = ["account", "exact_amount"]
    readonly_fields = ["exact_amount"]
    extra = 0
    can_delete = False
    verbose_name_plural = "legs (above zero: credit)"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Entry]:
        return super().get_queryset(request).select_related("account")

    @admin.display(description="amount")
    def exact_amount(self, entry: Entry) -> str:
        return format_money(entry.amount)


@admin.register(Journal)
class JournalAdmin(BooksAdmin):
    list_display = ["id", "kind", "currency", "effective_at", "actor", "idem_scope", "idem_key"]
    list_filter = ["kind", "currency"]
    search_fields = ["=idem_key", "=public_id"]
    raw_id_fields = ["reverses"]
    exclude = ["request_hash"]
    inlines = [LegInline]


@admin.register(Account)
class AccountAdmin(BooksAdmin):
    list_display = ["code", "type", "currency", "posted", "held", "owner", "closed_at"]
    list_filter = ["type", "currency", "hot"]
    search_fields = ["code", "=owner"]
    readonly_fields = ["posted", "held"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Account]:
        # A wallet's balance is kept; that of a platform account is the sum of its entries.
        total = (
            Entry.objects.filter(account=OuterRef("pk"))
            .order_by()
            .values("account")
            .annotate(t=Sum("amount"))
        )
        amount = DecimalField(max_digits=24, decimal_places=9)
        return (
            super()
            .get_queryset(request)
            .annotate(
                total_posted=Coalesce(
                    F("balance__posted"),
                    Subquery(total.values("t"), output_field=amount),
                    output_field=amount,
                ),
                total_held=F("balance__held"),
            )
        )

    @admin.display(description="posted (above zero: credit)")
    def posted(self, account: Account) -> str:
        return _plain(account.total_posted)  # type: ignore[attr-defined]

    @admin.display(description="held")
    def held(self, account: Account) -> str:
        return _plain(account.total_held)  # type: ignore[attr-defined]


@admin.register(Hold)
class HoldAdmin(BooksAdmin):
    list_display = ["id", "account", "exact_amount", "captured", "state", "expires_at", "key"]
    list_filter = ["state"]
    list_select_related = ["account"]
    search_fields = ["=key", "=account__code"]
    raw_id_fields = ["account", "journal"]


@admin.register(Settlement)
class SettlementAdmin(BooksAdmin):
    list_display = ["external_id", "provider", "kind", "account", "exact_gross", "fee", "net", "created_at"]
    list_filter = ["provider", "kind"]
    list_select_related = ["account"]
    search_fields = ["=external_id", "=order_id"]

    @admin.display(description="gross", ordering="gross")
    def exact_gross(self, settlement: Settlement) -> str:
        return format_money(settlement.gross)


@admin.register(TopUp)
class TopUpAdmin(BooksAdmin):
    list_display = ["public_id", "account", "exact_amount", "state", "order_id", "created_at", "failure"]
    list_filter = ["state"]
    list_select_related = ["account"]
    search_fields = ["=order_id", "=public_id", "=account__code"]


@admin.register(InboundEvent)
class InboundEventAdmin(BooksAdmin):
    list_display = ["id", "channel", "about", "verified", "received_at", "applied_at", "parked_at", "error"]
    list_filter = ["channel", "verified", ("parked_at", EmptyFieldListFilter)]
    search_fields = ["=about"]
    readonly_fields = ["body"]
    exclude = ["raw"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[InboundEvent]:
        events = super().get_queryset(request)
        page = request.resolver_match.url_name if request.resolver_match else None
        return events.defer("raw") if page == "ledger_inboundevent_changelist" else events

    @admin.display(description="body as it came")
    def body(self, event: InboundEvent) -> str:
        return bytes(event.raw).decode(errors="replace")


@admin.register(Refund)
class RefundAdmin(BooksAdmin):
    list_display = [
        "public_id",
        "account",
        "exact_amount",
        "state",
        "external_id",
        "actor",
        "created_at",
        "failure",
    ]
    list_filter = ["state"]
    list_select_related = ["account"]
    search_fields = ["=external_id", "=public_id", "=account__code"]
    raw_id_fields = ["account", "capture", "hold"]


@admin.register(Dispute)
class DisputeAdmin(BooksAdmin):
    list_display = [
        "external_id",
        "capture_id",
        "exact_amount",
        "state",
        "stage",
        "reason",
        "outcome",
        "opened_at",
    ]
    list_filter = ["state"]
    search_fields = ["=external_id", "=capture_id"]
    raw_id_fields = ["hold"]


admin.site.unregister(PayPalIPN)


@admin.register(PayPalIPN)
class NotificationAdmin(BooksAdmin):
    """django-paypal's log of notifications, for reading: editing it would change nothing that is booked."""

    list_display = [
        "id",
        "txn_id",
        "payment_status",
        "mc_gross",
        "mc_currency",
        "invoice",
        "flag",
        "created_at",
    ]
    list_filter = ["flag", "payment_status"]
    search_fields = ["=txn_id", "=parent_txn_id", "=invoice"]


@admin.register(ParkedRefund)
class ParkedRefundAdmin(BooksAdmin):
    list_display = ["external_id", "kind", "capture_id", "gross", "fee", "parked_at", "applied_at", "error"]
    list_filter = [("applied_at", EmptyFieldListFilter), "kind"]
    search_fields = ["=external_id", "=capture_id"]


@admin.register(Reconciliation)
class ReconciliationAdmin(BooksAdmin):
    list_display = ["day", "provider", "theirs", "ours", "healed", "differences", "finished_at"]


@admin.register(Difference)
class DifferenceAdmin(BooksAdmin):
    list_display = ["external_id", "kind", "day", "currency", "their_gross", "our_gross", "their_fee", "our_fee",
                    "resolved_at", "detail"]  # fmt: skip
    list_filter = [("resolved_at", EmptyFieldListFilter), "kind"]
    search_fields = ["=external_id"]


@admin.register(Payout)
class PayoutAdmin(BooksAdmin):
    list_display = ["public_id", "payee", "exact_amount", "state", "bank_reference", "actor", "created_at"]
    list_filter = ["state"]
    search_fields = ["=bank_reference", "=public_id"]


@admin.register(AuditEvent)
class AuditEventAdmin(BooksAdmin):
    list_display = ["id", "created_at", "actor", "action", "object_type", "object_id", "request_id"]
    search_fields = ["=actor", "=object_id", "=request_id", "=action"]


@admin.register(PeriodClose)
class PeriodCloseAdmin(BooksAdmin):
    list_display = ["closed_through", "closed_by", "created_at", "note"]


def _plain(amount: Any) -> str:
    return "-" if amount is None else f"{amount.normalize():f}"
