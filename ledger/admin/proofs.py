"""Whether the books are right: the nightly proofs, and how far the audit trail is sealed."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from ledger.admin.base import BooksAdmin
from ledger.models import Difference, InboundEvent, ParkedRefund, Proposal, Verification
from ledger.selectors import audit_lag, last_proof


@admin.register(Verification)
class VerificationAdmin(BooksAdmin):
    change_list_template = "admin/ledger/proofs_change_list.html"
    change_form_template = "admin/ledger/proof_change_form.html"
    list_display = ["finished_at", "holds", "failed", "seconds"]
    list_filter = ["ok"]
    fields = ["started_at", "finished_at", "ok"]
    empty_text = "The books have not been proved yet. It happens every night, and by `manage.py ledger_verify` at any time."

    @admin.display(description="all hold", boolean=True)
    def holds(self, proof: Verification) -> bool:
        return proof.ok

    @admin.display(description="what does not")
    def failed(self, proof: Verification) -> str:
        return ", ".join(check["name"] for check in proof.checks if not check["ok"]) or "—"

    @admin.display(description="took (s)")
    def seconds(self, proof: Verification) -> str:
        return f"{(proof.finished_at - proof.started_at).total_seconds():.1f}"

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        lag = audit_lag()
        extra = {
            "proof": last_proof(),
            "audit_lag_s": None if lag is None else round(lag.total_seconds(), 1),
            "open_proposals": Proposal.objects.filter(state=Proposal.State.OPEN).count(),
            "parked_events": InboundEvent.objects.filter(
                parked_at__isnull=False, applied_at__isnull=True
            ).count(),
            "open_differences": Difference.objects.filter(resolved_at__isnull=True).count(),
            "parked_refunds": ParkedRefund.objects.filter(applied_at__isnull=True).count(),
        }
        return super().changelist_view(request, {**extra, **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        proof = self.get_object(request, object_id)
        extra = {"checks": proof.checks if proof else []}
        return super().change_view(request, object_id, form_url, {**extra, **(extra_context or {})})
