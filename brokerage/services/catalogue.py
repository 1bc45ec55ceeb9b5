"""What is sold and on which machines: models, prices, nodes. Written by staff and by `seed_demo`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.utils import timezone

from brokerage.models import ModelPrice, Node, ServedModel
from brokerage.services.audit import record


@transaction.atomic
def publish_model(*, name: str, context_tokens: int, actor: User | str, description: str = "") -> ServedModel:
    """The model of that name, made when it is new; an existing one keeps its settings."""
    model, new = ServedModel.objects.get_or_create(
        name=name, defaults={"context_tokens": context_tokens, "description": description}
    )
    if new:
        record("model.published", subject=model, actor=actor, name=name, context_tokens=context_tokens)
    return model


@transaction.atomic
def change_model(*, served_model: ServedModel, fields: Sequence[str], actor: User | str) -> None:
    """Stores the named fields of `served_model` as they are on the object."""
    if not fields:
        return
    served_model.save(update_fields=fields)
    changes = {name: getattr(served_model, name) for name in fields}
    record("model.changed", subject=served_model, actor=actor, changes=changes)


@transaction.atomic
def set_price(
    *,
    served_model: ServedModel,
    prompt_rate: Decimal,
    completion_rate: Decimal,
    actor: User | str,
    currency: str = "USD",
) -> ModelPrice:
    """The price per token from now on. Answers that were admitted before keep theirs.

    Setting the price that is in force changes nothing. Raises ValidationError.
    """
    if min(prompt_rate, completion_rate) < 0:
        raise ValidationError("A price must not be negative.")
    # One at a time per model; the constraint one_price_at_a_time holds against everybody else.
    ServedModel.objects.select_for_update().get(pk=served_model.pk)
    now = timezone.now()
    current = ModelPrice.objects.filter(
        served_model=served_model, currency=currency, valid__contains=now
    ).first()
    if current and (current.prompt_rate, current.completion_rate) == (prompt_rate, completion_rate):
        return current
    if current:
        _end_price(current, now)
    price = ModelPrice(
        served_model=served_model,
        currency=currency,
        prompt_rate=prompt_rate,
        completion_rate=completion_rate,
        valid=DateTimeTZRange(now, None, "[)"),
    )
    price.clean_fields()
    try:
        with transaction.atomic():
            price.save(force_insert=True)
    except IntegrityError as error:
        raise ValidationError("Another price is set for a later time: remove that one first.") from error
    record(
        "price.set",
        subject=price,
        actor=actor,
        model=served_model.name,
        currency=currency,
        prompt_rate=f"{prompt_rate:f}",
        completion_rate=f"{completion_rate:f}",
    )
    return price


def _end_price(price: ModelPrice, at: datetime) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {ModelPrice._meta.db_table} SET valid = tstzrange(lower(valid), %s, '[)') WHERE id = %s",  # noqa: S608
            [at, price.pk],
        )


@transaction.atomic
def register_node(
    *,
    name: str,
    served_model: ServedModel,
    actor: User | str,
    provider: str = "mesh",
    zone: str = "",
    hourly_rate: Decimal = Decimal(0),
) -> Node:
    """Announces a machine: from now on its worker may report. An existing one stays as it is."""
    node, new = Node.objects.get_or_create(
        name=name,
        defaults={
            "served_model": served_model,
            "provider": provider,
            "zone": zone,
            "hourly_rate": hourly_rate,
        },
    )
    if new:
        record(
            "node.registered",
            subject=node,
            actor=actor,
            name=name,
            model=served_model.name,
            provider=provider,
        )
    return node
