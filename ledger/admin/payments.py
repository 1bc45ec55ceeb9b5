"""Money from and to the outside: what was told, what was settled, and what waits for somebody."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from paypal.standard.ipn import admin as _registers_its_own  # noqa: F401
from paypal.standard.ipn.models import PayPalIPN

from ledger.admin.base import BooksAdmin, actor_of, may
from ledger.models import InboundEvent, ParkedRefund, Proposal, Settlement, TopUp
from ledger.money import format_money
from ledger.paypal.events import dismiss_event, retry_event


@admin.register(Settlement)
class SettlementAdmin(BooksAdmin):
    change_form_template = "admin/ledger/settlement_change_form.html"
    list_display = ["external_id", "provider", "kind", "account", "exact_gross", "fee", "net", "created_at"]
    list_filter = ["provider", "kind"]
    list_select_related = ["account"]
    search_fields = ["=external_id", "=order_id"]
    raw_id_fields = ["account", "journal", "top_up"]
    empty_text = "No money has moved yet. A captured payment would be here, once whatever told us of it."

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        extra = {"may_propose": may(request, "add", Proposal)}
        return super().change_view(request, object_id, form_url, {**extra, **(extra_context or {})})

    @admin.display(description="gross")
    def exact_gross(self, settlement: Settlement) -> str:
        return format_money(settlement.gross)


@admin.register(TopUp)
class TopUpAdmin(BooksAdmin):
    list_display = ["public_id", "account", "exact_amount", "state", "order_id", "created_at", "failure"]
    list_filter = ["state"]
    list_select_related = ["account"]
    search_fields = ["=order_id", "=public_id", "=account__code"]
    empty_text = "Nobody has begun a purchase yet."


class WaitsForSomebody(admin.SimpleListFilter):
    title = "waits for"
    parameter_name = "waits"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("person", "somebody to look at it"), ("retry", "its next try")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[InboundEvent]) -> QuerySet[InboundEvent]:
        waiting = {
            "person": Q(parked_at__isnull=False, applied_at__isnull=True),
            "retry": Q(parked_at__isnull=True, applied_at__isnull=True),
        }
        return queryset.filter(waiting.get(self.value() or "", Q()))


@admin.register(InboundEvent)
class InboundEventAdmin(BooksAdmin):
    """What a provider told us. One that could not be applied is parked until somebody has looked at it."""

    list_display = [
        "id",
        "channel",
        "received_at",
        "verified",
        "attempts",
        "parked_at",
        "applied_at",
        "error",
    ]
    list_filter = [WaitsForSomebody, "channel"]
    readonly_fields = ["body"]
    exclude = ["raw"]
    actions = ["retry", "dismiss"]
    empty_text = "No provider has told us anything yet."

    def get_queryset(self, request: HttpRequest) -> QuerySet[InboundEvent]:
        events = super().get_queryset(request)
        page = request.resolver_match.url_name if request.resolver_match else None
        return events.defer("raw") if page == "ledger_inboundevent_changelist" else events

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return may(request, "change", InboundEvent)

    @admin.display(description="body as it came")
    def body(self, event: InboundEvent) -> str:
        return bytes(event.raw).decode(errors="replace")

    @admin.action(description="Try again", permissions=["operate"])
    def retry(self, request: HttpRequest, queryset: QuerySet[InboundEvent]) -> None:
        self._each(request, queryset, "tried again", partial(retry_event, actor=actor_of(request)))

    @admin.action(description="Close: nothing has to be booked", permissions=["operate"])
    def dismiss(self, request: HttpRequest, queryset: QuerySet[InboundEvent]) -> None:
        closed = partial(dismiss_event, reason="closed in the back office", actor=actor_of(request))
        self._each(request, queryset, "closed", closed)

    def _each(
        self, request: HttpRequest, queryset: QuerySet[InboundEvent], done: str, work: Callable[..., Any]
    ) -> None:
        count = 0
        for pk in queryset.values_list("pk", flat=True):
            try:
                work(event_id=pk)
            except ValueError as error:
                self.message_user(request, f"{error}.", messages.WARNING)
            else:
                count += 1
        if count:
            self.message_user(request, f"{count} {done}.", messages.SUCCESS)


@admin.register(ParkedRefund)
class ParkedRefundAdmin(BooksAdmin):
    list_display = [
        "external_id",
        "provider",
        "capture_id",
        "exact_gross",
        "parked_at",
        "applied_at",
        "error",
    ]
    list_filter = ["provider", ("applied_at", admin.EmptyFieldListFilter)]
    search_fields = ["=external_id", "=capture_id"]
    empty_text = (
        "No refund waits for its purchase. One that is told first is kept here until the purchase is booked."
    )

    @admin.display(description="gross")
    def exact_gross(self, refund: ParkedRefund) -> str:
        return format_money(refund.gross)


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
    empty_text = "No notification came. This is the second way to hear of payments; webhooks are the first."
