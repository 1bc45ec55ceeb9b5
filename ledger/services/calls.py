"""How a service calls a function of ledger/sql."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from psycopg.types.json import Jsonb

from ledger.errors import translated


def call(query: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The rows of a query; inside a transaction it is a savepoint. Raises LedgerErrors."""
    with translated(), connection.cursor() as cursor:
        if not connection.in_atomic_block:
            cursor.execute(query, params)
            return cursor.fetchall()
        with transaction.atomic():
            cursor.execute(query, params)
            return cursor.fetchall()


def as_jsonb(value: Any) -> Jsonb:
    return Jsonb(plain(value))


def plain(value: Any) -> Any:
    """With times, decimals and UUIDs as text."""
    return json.loads(json.dumps(value, cls=DjangoJSONEncoder))
