"""What a webhook's body speaks of. Only names: no figure of an event is ever used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class About(StrEnum):
    PURCHASE = "purchase"  # an order or its capture
    RETURN = "return"  # a refund or a reversal
    DISPUTE = "dispute"
    NOTHING = "nothing"  # nothing that moves our money


@dataclass(frozen=True, slots=True)
class Subject:
    """`external_id` is PayPal's id of it; `order_id` and `reference` (ours) are told for purchases.

    `took_money`: the event says that money was taken, so that a purchase of ours has to be there.
    """

    about: About
    external_id: str
    order_id: str = ""
    reference: str = ""
    took_money: bool = False
    reversed: bool = False


_RETURNS = frozenset({"PAYMENT.CAPTURE.REFUNDED", "PAYMENT.CAPTURE.REVERSED"})


def subject_of(raw: bytes) -> Subject:
    """Never raises: a body that cannot be read speaks of nothing."""
    try:
        body = json.loads(raw)
    except ValueError:
        return Subject(About.NOTHING, "")
    kind = _text(_dict(body).get("event_type"))
    resource = _dict(_dict(body).get("resource"))
    own_id = _text(resource.get("id"))
    if kind.startswith("CHECKOUT.ORDER."):
        return Subject(About.PURCHASE, own_id, order_id=own_id)
    if kind.startswith("CHECKOUT.PAYMENT-APPROVAL."):
        order_id = _text(resource.get("order_id"))
        return Subject(About.PURCHASE, order_id, order_id=order_id)
    if kind in _RETURNS or kind.startswith("PAYMENT.REFUND."):
        return Subject(About.RETURN, own_id, reversed=kind.endswith(".REVERSED"))
    if kind.startswith("PAYMENT.CAPTURE."):
        related = _dict(_dict(resource.get("supplementary_data")).get("related_ids"))
        return Subject(
            About.PURCHASE,
            own_id,
            order_id=_text(related.get("order_id")),
            reference=_text(resource.get("custom_id")) or _text(resource.get("invoice_id")),
            took_money=kind == "PAYMENT.CAPTURE.COMPLETED",
        )
    if kind.startswith("CUSTOMER.DISPUTE."):
        return Subject(About.DISPUTE, _text(resource.get("dispute_id")))
    return Subject(About.NOTHING, "")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) and "\0" not in value else ""
