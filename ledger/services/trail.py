"""The audit trail."""

from __future__ import annotations

from typing import Any

from ledger.models import AuditEvent
from ledger.services.calls import plain


def record_audit_event(
    *,
    actor: str,
    action: str,
    object_type: str,
    object_id: str,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    request_id: str = "",
) -> None:
    """Appends to the audit trail, in the caller's transaction. No secrets in `before` and `after`."""
    AuditEvent.objects.bulk_create(
        [
            AuditEvent(
                actor=actor,
                action=action,
                object_type=object_type,
                object_id=object_id,
                before=plain(before),
                after=plain(after),
                request_id=request_id,
            )
        ]
    )
