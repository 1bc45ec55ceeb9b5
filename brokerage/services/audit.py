"""One line in the audit trail for every change, in the same transaction as the change."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db.models import Model

from ledger.services import record_audit_event


def record(action: str, *, subject: Model, actor: User | str | None = None, **data: Any) -> None:
    """`actor` is a person, or the name of the part of the system that acted. No secrets in `data`."""
    record_audit_event(
        action=action,
        actor=_name(actor),
        subject=f"{subject._meta.label_lower}:{subject.pk}",
        data=data,
    )


def _name(actor: User | str | None) -> str:
    if isinstance(actor, User):
        return f"user:{actor.get_username()}"
    return actor or "system"
