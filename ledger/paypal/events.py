"""What PayPal tells us, by webhook or by sending the payer back: stored as it came, and a reason to look.

Nothing here credits anybody. So a forged event costs one look at PayPal's API and no more.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from django.db import transaction
from kombu.exceptions import OperationalError

from ledger.models import InboundEvent, TopUp

logger = logging.getLogger(__name__)

_KEPT_HEADERS = ("paypal-transmission-id", "paypal-transmission-time", "paypal-transmission-sig",
                 "paypal-cert-url", "paypal-auth-algo", "content-type")  # fmt: skip


@transaction.atomic
def record_inbound_event(
    *, channel: str, raw: bytes, headers: Mapping[str, str] | None = None
) -> InboundEvent:
    """The event of these bytes; the same bytes again are the same event."""
    kept = {name.lower(): value[:2000] for name, value in (headers or {}).items()}
    event = InboundEvent(
        channel=channel,
        dedup_key=f"{channel}:{hashlib.sha256(raw).hexdigest()}",
        raw=raw,
        headers={name: kept[name] for name in _KEPT_HEADERS if name in kept},
    )
    InboundEvent.objects.bulk_create([event], ignore_conflicts=True)
    return InboundEvent.objects.get(dedup_key=event.dedup_key)


def note_webhook(*, raw: bytes, headers: Mapping[str, str]) -> None:
    """Stores a webhook and has the order it speaks of looked at, if it is one of ours."""
    event = record_inbound_event(channel="paypal.webhook", raw=raw, headers=headers)
    _look_at(order_id=order_id_of(raw), event=event)


def note_return(*, order_id: str) -> None:
    """The payer came back from PayPal with this order id (`token` in the query)."""
    event = record_inbound_event(channel="paypal.return", raw=order_id.encode())
    _look_at(order_id=order_id, event=event)


def order_id_of(raw: bytes) -> str:
    """The order that a webhook's body speaks of, "" when it does not."""
    try:
        body = json.loads(raw)
    except ValueError:
        return ""
    resource = _dict(body).get("resource")
    if str(_dict(body).get("event_type")).startswith("CHECKOUT.ORDER."):
        found = _dict(resource).get("id")
    else:
        related = _dict(_dict(_dict(resource).get("supplementary_data")).get("related_ids"))
        found = related.get("order_id")
    return found if isinstance(found, str) else ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _look_at(*, order_id: str, event: InboundEvent) -> None:
    top_up_id = TopUp.objects.filter(order_id=order_id).values_list("pk", flat=True).first()
    if top_up_id is not None:
        transaction.on_commit(partial(_send, top_up_id, event.pk))


def _send(top_up_id: int, event_id: int) -> None:
    from ledger.tasks import settle_top_up

    try:
        settle_top_up.delay(top_up_id, event_id)
    except (OperationalError, OSError) as error:
        logger.warning("top-up %s waits for the sweep, the broker is away: %s", top_up_id, error)
