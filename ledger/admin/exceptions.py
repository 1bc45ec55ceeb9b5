"""Money that goes back or does not add up: refunds, disputes, reconciliation, grants."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_POST
from djmoney.money import Money

from ledger.admin.base import BooksAdmin, actor_of, may
from ledger.models import CreditGrant, Difference, Dispute, Reconciliation, Refund
from ledger.money import format_money
from ledger.paypal.reconciliation import resolve_difference


@admin.register(CreditGrant)
class CreditGrantAdmin(BooksAdmin):
    list_display = [
        "id",
        "account",
        "kind",
        "exact_amount",
        "remaining",
        "priority",
        "expires_at",
        "created_at",
    ]
    list_filter = ["kind"]
    list_select_related = ["account"]
    search_fields = ["=account__code"]
    raw_id_fields = ["account", "journal"]
    empty_text = "No credit was granted. A grant is proposed on a wallet's page."


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
    search_fields = ["=public_id", "=external_id", "=account__code"]
    raw_id_fields = ["account", "capture", "hold"]
    empty_text = "No money was sent back. A refund is proposed on the page of the purchase's settlement."


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
    empty_text = "No payer has complained. The disputed credit is held until PayPal has decided."


@admin.register(Reconciliation)
class ReconciliationAdmin(BooksAdmin):
    list_display = ["day", "provider", "theirs", "ours", "healed", "differences", "finished_at"]
    list_filter = ["provider"]
    empty_text = "No day was compared yet. Every night the days before are, with the provider's own list."


class OpenDifferences(admin.SimpleListFilter):
    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("open", "open"), ("resolved", "resolved")]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() in {"open", "resolved"}:
            return queryset.filter(resolved_at__isnull=self.value() == "open")
        return queryset


@admin.register(Difference)
class DifferenceAdmin(BooksAdmin):
    change_form_template = "admin/ledger/difference_change_form.html"
    list_display = ["day", "kind", "external_id", "theirs", "ours", "found_at", "resolved_at"]
    list_filter = [OpenDifferences, "kind", "provider"]
    search_fields = ["=external_id"]
    empty_text = "Nothing differs: the provider's list and our books say the same."

    @admin.display(description="theirs")
    def theirs(self, difference: Difference) -> str:
        return _money(difference.their_gross, difference.currency)

    @admin.display(description="ours")
    def ours(self, difference: Difference) -> str:
        return _money(difference.our_gross, difference.currency)

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(require_POST(self.resolve_view))
        return [path("<int:pk>/resolve/", view, name="ledger_resolve"), *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        extra = {"may_resolve": may(request, "change", Difference)}
        return super().change_view(request, object_id, form_url, {**extra, **(extra_context or {})})

    def resolve_view(self, request: HttpRequest, pk: int) -> HttpResponseRedirect:
        if not may(request, "change", Difference):
            raise PermissionDenied
        try:
            resolve_difference(
                difference_id=pk, resolution=request.POST.get("resolution", ""), actor=actor_of(request)
            )
        except Difference.DoesNotExist as error:
            raise Http404 from error
        except ValueError as error:
            self.message_user(request, f"Not resolved: {error}.", messages.ERROR)
        else:
            self.message_user(request, "Resolved.", messages.SUCCESS)
        return HttpResponseRedirect(reverse("admin:ledger_difference_change", args=[pk]))


def _money(amount: Decimal | None, currency: str) -> str:
    return "—" if amount is None else format_money(Money(amount, currency))
