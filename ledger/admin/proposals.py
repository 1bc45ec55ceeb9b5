"""Corrections by hand: proposed on one page, decided by another person on the next."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_POST

from ledger.admin.base import BooksAdmin, actor_of, may
from ledger.admin.forms import FORMS
from ledger.errors import LedgerError
from ledger.models import Proposal
from ledger.money import format_money
from ledger.proposals.services import ProposalRefused, approve, exceeds_limit, limit, propose, reject


@admin.register(Proposal)
class ProposalAdmin(BooksAdmin):
    change_list_template = "admin/ledger/proposal_change_list.html"
    change_form_template = "admin/ledger/proposal_change_form.html"
    list_display = ["id", "kind", "summary", "state", "proposed_by", "proposed_at", "decided_by"]
    list_filter = ["state", "kind"]
    search_fields = ["=public_id", "=proposed_by", "=decided_by"]
    fields = [
        "kind", "summary", "exact_amount", "account", "reason", "state", "proposed_by", "proposed_at",
        "decided_by", "decided_at", "note", "journal",
    ]  # fmt: skip
    raw_id_fields = ["account", "journal"]
    readonly_fields = ["exact_amount"]
    empty_text = "Nobody has proposed a correction. Begin at a wallet, a journal or a settlement, or choose a kind above."

    @admin.display(description="amount")
    def exact_amount(self, proposal: Proposal) -> str:
        return format_money(proposal.amount) if proposal.amount is not None else "—"

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        own = [
            path("propose/<slug:kind>/", view(self.propose_view), name="ledger_propose"),
            path("<int:pk>/decide/", view(require_POST(self.decide_view)), name="ledger_decide"),
        ]
        return [*own, *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        kinds = (
            [{"kind": kind, "form": form} for kind, form in FORMS.items()]
            if self._may_propose(request)
            else []
        )
        return super().changelist_view(request, {"kinds": kinds, **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        proposal = self.get_object(request, object_id)
        extra: dict[str, Any] = {}
        if proposal and proposal.state == Proposal.State.OPEN:
            own = proposal.proposed_by == actor_of(request)
            extra = {
                "own": own,
                "may_decide": may(request, "change", Proposal),
                "above_limit": exceeds_limit(proposal.amount),
                "may_exceed": _may_exceed(request),
                "limit": f"{limit():f}",
            }
        return super().change_view(request, object_id, form_url, {**extra, **(extra_context or {})})

    def propose_view(self, request: HttpRequest, kind: str) -> HttpResponse:
        if not self._may_propose(request):
            raise PermissionDenied
        form_class = FORMS.get(kind)
        if form_class is None:
            raise Http404
        form = (
            form_class(request.POST) if request.method == "POST" else form_class(initial=request.GET.dict())
        )
        if request.method == "POST" and form.is_valid():
            try:
                proposal = propose(kind=form_class.kind, actor=actor_of(request), **form.terms())
            except ProposalRefused as refusal:
                form.add_error(None, str(refusal))
            else:
                self.message_user(
                    request,
                    "Proposed. It is done when another person approves it.",
                    messages.SUCCESS,
                )
                return redirect("admin:ledger_proposal_change", proposal.pk)
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": f"Propose to {form_class.kind.label}",
            "form": form,
            "intro": form_class.intro,
            "limit": f"{limit():f}",
        }
        status = 422 if form.errors else 200
        return TemplateResponse(request, "admin/ledger/propose.html", context, status=status)

    def decide_view(self, request: HttpRequest, pk: int) -> HttpResponseRedirect:
        proposal = Proposal.objects.filter(pk=pk).first()
        if proposal is None:
            raise Http404
        actor, note = actor_of(request), request.POST.get("note", "")[:1000]
        own = proposal.proposed_by == actor
        approves = request.POST.get("decision") == "approve"
        if not may(request, "change", Proposal) and not (own and not approves):
            raise PermissionDenied
        try:
            if approves:
                approve(proposal=proposal, actor=actor, may_exceed_limit=_may_exceed(request), note=note)
                said = (
                    "Approved. The money goes now."
                    if proposal.kind == Proposal.Kind.REFUND
                    else "Approved, and done."
                )
                self.message_user(request, said, messages.SUCCESS)
            else:
                decided = reject(proposal=proposal, actor=actor, note=note)
                self.message_user(request, f"The proposal is {decided.state}.", messages.SUCCESS)
        except (ProposalRefused, LedgerError, ValueError) as refusal:
            self.message_user(request, f"Nothing was done. {refusal}", messages.ERROR)
        return HttpResponseRedirect(reverse("admin:ledger_proposal_change", args=[pk]))

    def _may_propose(self, request: HttpRequest) -> bool:
        return may(request, "add", Proposal)


def _may_exceed(request: HttpRequest) -> bool:
    assert isinstance(request.user, User)
    return request.user.has_perm("ledger.decide_large_proposal")
