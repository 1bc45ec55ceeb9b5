"""Payouts to providers: what is owed, what is on its way, and the bank's word on each."""

from __future__ import annotations

from datetime import datetime, time
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone

from ledger.admin.base import BooksAdmin, actor_of, may
from ledger.errors import LedgerError
from ledger.models import Payout, Proposal
from ledger.payouts import cancel_payout, confirm_payout, mark_payout_sent, owed_to_payees


class SentForm(forms.Form):
    action, button = "sent", "The bank has the order"


class ConfirmForm(forms.Form):
    action, button = "confirm", "Confirm that it is paid"

    bank_reference = forms.CharField(max_length=64, help_text="As the bank's statement has it. It pays once.")
    paid_on = forms.DateField(
        help_text="The day of the statement's entry.", widget=forms.DateInput(attrs={"type": "date"})
    )

    def clean_paid_on(self) -> Any:
        if self.cleaned_data["paid_on"] > timezone.now().date():
            raise forms.ValidationError("That day has not come yet.")
        return self.cleaned_data["paid_on"]


class CancelForm(forms.Form):
    action, button = "cancel", "Cancel the payout"

    why = forms.CharField(
        max_length=500,
        help_text="Never sent, or sent back by the bank. What we owe stays owed.",
        widget=forms.Textarea(attrs={"rows": 2}),
    )


FORMS = {form.action: form for form in (SentForm, ConfirmForm, CancelForm)}
_OF_STATE = {
    Payout.State.INTENDED: ("sent", "confirm", "cancel"),
    Payout.State.SENT: ("confirm", "cancel"),
}


@admin.register(Payout)
class PayoutAdmin(BooksAdmin):
    change_list_template = "admin/ledger/payout_change_list.html"
    change_form_template = "admin/ledger/payout_change_form.html"
    list_display = ["id", "payee", "exact_amount", "state", "bank_reference", "created_at"]
    list_filter = ["state"]
    fields = ["payee", "exact_amount", "state", "bank_reference", "note", "actor", "created_at", "changed_at"]
    readonly_fields = ["exact_amount"]
    search_fields = ["=public_id", "=payee", "=bank_reference"]
    empty_text = "Nothing was paid to a provider yet. Book a bill first, then propose to pay it."

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.move_view)
        return [path("<int:pk>/move/<slug:action>/", view, name="ledger_payout_move"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        extra = {"owed": owed_to_payees(), "may_propose": may(request, "add", Proposal)}
        return super().changelist_view(request, {**extra, **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        payout = self.get_object(request, object_id)
        moves = [FORMS[action]() for action in _moves(payout)] if may(request, "change", Payout) else []
        extra = {"moves": moves}
        return super().change_view(request, object_id, form_url, {**extra, **(extra_context or {})})

    def move_view(self, request: HttpRequest, pk: int, action: str) -> Any:
        if not may(request, "change", Payout):
            raise PermissionDenied
        payout = Payout.objects.filter(pk=pk).first()
        if payout is None or action not in FORMS or request.method != "POST":
            raise Http404
        form = FORMS[action](request.POST)
        if form.is_valid():
            try:
                _move(payout, action, form.cleaned_data, actor_of(request))
            except (LedgerError, ValueError) as refusal:
                form.add_error(None, f"Nothing was done: {refusal}.")
            else:
                payout.refresh_from_db()
                self.message_user(request, f"The payout is {payout.state}.", messages.SUCCESS)
                return HttpResponseRedirect(reverse("admin:ledger_payout_change", args=[pk]))
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": f"{payout.payee}, {self.exact_amount(payout)}",
            "payout": payout,
            "form": form,
        }
        return TemplateResponse(request, "admin/ledger/payout_move.html", context, status=422)


def _moves(payout: Payout | None) -> tuple[str, ...]:
    return _OF_STATE.get(Payout.State(payout.state), ()) if payout else ()


def _move(payout: Payout, action: str, wanted: dict[str, Any], actor: str) -> None:
    if action == SentForm.action:
        mark_payout_sent(payout_id=payout.pk, actor=actor)
    elif action == ConfirmForm.action:
        paid_at = datetime.combine(wanted["paid_on"], time(12), timezone.get_current_timezone())
        confirm_payout(
            payout_id=payout.pk,
            bank_reference=wanted["bank_reference"],
            paid_at=min(paid_at, timezone.now()),
            actor=actor,
        )
    else:
        cancel_payout(payout_id=payout.pk, reason=wanted["why"], actor=actor)
