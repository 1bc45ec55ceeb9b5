"""One line in the audit trail for every change, in the same transaction as the change."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db.models import Model

from ledger.services import record_audit_event


def record(action: str, *, subject: Model, actor: User | str | None = None, **data: Any) -> None:
    """`actor` is a person, or the name of the part of the system that acted; `data` is what is so from now on,
    without secrets."""
    record_audit_event(
        actor=_name(actor),
        action=action,
        object_type=subject._meta.model_name or "",
        object_id=str(subject.pk),
        after=data,
    )


def _name(actor: User | str | None) -> str:
    if isinstance(actor, User):
        return f"user:{actor.get_username()}"
    return actor or "system"
