"""What an API key may do in a minute and at a time. Gateways follow within a second."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction

from brokerage.models import APIKey
from brokerage.services.audit import record

FIELDS = ("requests_per_minute", "tokens_per_minute", "concurrent_answers")


@transaction.atomic
def set_key_limits(
    *,
    key: APIKey,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrent_answers: int | None,
    actor: User | None,
) -> bool:
    """None is no limit. True when this call changed something. Raises ValidationError, keyed by field."""
    wanted = dict(zip(FIELDS, (requests_per_minute, tokens_per_minute, concurrent_answers), strict=True))
    stored = APIKey.objects.select_for_update(no_key=True).get(pk=key.pk)
    for name, value in wanted.items():
        setattr(key, name, value)
    if {name: getattr(stored, name) for name in FIELDS} == wanted:
        return False
    key.clean_fields(exclude={field.name for field in key._meta.fields} - set(FIELDS))
    key.save(update_fields=FIELDS)
    record("api_key.limits_changed", actor=actor, subject=key, customer=str(key.customer_id), **wanted)
    return True
