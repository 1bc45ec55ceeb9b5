"""Background work of the site."""

from __future__ import annotations

from celery import shared_task

from apex.api import idempotency


@shared_task(name="apex.tasks.forget_old_requests")
def forget_old_requests() -> int:
    """Deletes idempotency keys whose day is over; returns how many."""
    return idempotency.forget_old_requests()
