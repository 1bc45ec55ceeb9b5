"""What came in: stored as it came, once, with a hint to the worker; refused ones leave a trace and no more."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import partial

from django.db import transaction
from kombu.exceptions import OperationalError

from ledger.models import InboundEvent
from ledger.paypal.throttle import Throttle
from ledger.services import record_audit_event

logger = logging.getLogger(__name__)

_KEPT_HEADERS = ("paypal-transmission-id", "paypal-transmission-time", "paypal-transmission-sig",
                 "paypal-cert-url", "paypal-auth-algo", "content-type")  # fmt: skip
# Anybody can send rubbish: a reason is audited once a minute, all are logged.
audited = Throttle(times=1, seconds=60)


@transaction.atomic
def store_event(
    *,
    channel: str,
    raw: bytes,
    about: str,
    verified: bool | None,
    headers: Mapping[str, str] | None = None,
) -> InboundEvent:
    """The event of these bytes, and a hint to have it applied; the same bytes again are the same event."""
    kept = {name.lower(): value[:2000] for name, value in (headers or {}).items()}
    event = InboundEvent(
        channel=channel,
        dedup_key=f"{channel}:{hashlib.sha256(raw).hexdigest()}",
        about=about[:127].replace("\0", ""),
        raw=raw,
        headers={name: kept[name] for name in _KEPT_HEADERS if name in kept},
        verified=verified,
    )
    InboundEvent.objects.bulk_create([event], ignore_conflicts=True)
    event = InboundEvent.objects.get(dedup_key=event.dedup_key)
    transaction.on_commit(partial(hint, event.pk))
    return event


def hint(event_id: int) -> None:
    """Has the worker apply the event soon. Losing this loses nothing: the sweep finds it."""
    from ledger.tasks import apply_event

    try:
        apply_event.delay(event_id)
    except (OperationalError, OSError) as error:
        logger.warning("event %s waits for the sweep, the broker is away: %s", event_id, error)


def audit_refused(*, channel: str, reason: str, raw: bytes) -> None:
    """A trace of what was not believed: its digest, never its words."""
    digest = hashlib.sha256(raw).hexdigest()
    logger.warning("refused an event on %s (%s): sha256 %s", channel, reason, digest)
    if audited.allows(f"{channel}: {reason}"):
        record_audit_event(
            actor="anonymous",
            action="paypal.event_refused",
            object_type="inbound_event",
            object_id=digest,
            after={"channel": channel, "reason": reason[:300], "bytes": len(raw)},
        )
