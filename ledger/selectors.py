"""Every read of the books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

from django.db import connection
from django.db.models import F, Sum

from ledger.models import Account, Entry, Verification


@dataclass(frozen=True, slots=True)
class Wallet:
    """`available` = posted - held - floor: what may be spent. All in `currency`."""

    account_id: int
    currency: str
    posted: Decimal
    held: Decimal
    available: Decimal


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One leg on an account; `balance` is the account's right after it. > 0 credits the account."""

    id: int
    journal_public_id: UUID
    kind: str
    amount: Decimal
    balance: Decimal
    currency: str
    effective_at: datetime
    created_at: datetime


@dataclass(frozen=True, slots=True)
class EntriesPage:
    """Newest first. `next_cursor` is the `before` of the page that follows, None at the end."""

    entries: Sequence[EntryRow]
    next_cursor: int | None


@dataclass(frozen=True, slots=True)
class Proof:
    """The last nightly proof of the books; `failed` names the checks that did not hold."""

    ok: bool
    finished_at: datetime
    failed: Sequence[str]


def wallet(code: str) -> Wallet:
    """One query. Raises Account.DoesNotExist."""
    row = (
        Account.objects.filter(code=code, balance__isnull=False)
        .annotate(
            posted=F("balance__posted"),
            held=F("balance__held"),
            available=F("balance__posted") - F("balance__held") - F("balance__floor"),
        )
        .values_list("pk", "currency", "posted", "held", "available")
        .first()
    )
    if row is None:
        raise Account.DoesNotExist(f"there is no wallet {code!r}")
    return Wallet(*row)


def account_balance(account: Account) -> Decimal:
    """What is posted on the account, > 0 a credit balance. A hot account is summed up from its entries."""
    if not account.hot:
        return account.balance.posted
    return Entry.objects.filter(account=account).aggregate(total=Sum("amount", default=Decimal(0)))["total"]


# Running balances are counted back from the sum of what is older than the cursor; one snapshot, one query.
_PAGE = """
WITH page AS (
    SELECT e.id, e.journal_id, e.amount, e.amount_currency
      FROM ledger_entries e
     WHERE e.account_id = %(account)s AND (%(before)s::bigint IS NULL OR e.id < %(before)s::bigint)
     ORDER BY e.id DESC LIMIT %(limit)s
), older AS (
    SELECT coalesce(sum(e.amount), 0) AS total
      FROM ledger_entries e WHERE e.account_id = %(account)s AND e.id < (SELECT min(id) FROM page)
)
SELECT p.id, j.public_id, j.kind, p.amount,
       (SELECT total FROM older) + sum(p.amount) OVER (ORDER BY p.id),
       p.amount_currency, j.effective_at, j.created_at
  FROM page p JOIN ledger_journal j ON j.id = p.journal_id
 ORDER BY p.id DESC
"""


def entries_page(*, account_id: int, before: int | None = None, limit: int = 50) -> EntriesPage:
    """A page of an account's history by entry id, newest first. `limit` entries at most, 1 to 500."""
    limit = max(1, min(limit, 500))
    with connection.cursor() as cursor:
        cursor.execute(_PAGE, {"account": account_id, "before": before, "limit": limit + 1})
        rows = [EntryRow(*row) for row in cursor.fetchall()]
    more = len(rows) > limit
    return EntriesPage(rows[:limit], rows[limit - 1].id if more else None)


# Per shard that has seals the oldest event behind its head; shards without any by their first event.
_LAG = """
WITH RECURSIVE shards AS (
    SELECT min(shard) AS shard FROM audit_events
    UNION ALL
    SELECT (SELECT min(e.shard) FROM audit_events e WHERE e.shard > shards.shard) FROM shards WHERE shard IS NOT NULL
)
SELECT clock_timestamp() - min(waiting.created_at)
  FROM shards
  LEFT JOIN LATERAL (SELECT s.xact_id, s.event_id FROM audit_seal s
                      WHERE s.shard = shards.shard ORDER BY s.seq DESC LIMIT 1) head ON true
  CROSS JOIN LATERAL (SELECT e.created_at FROM audit_events e
                       WHERE e.shard = shards.shard
                         AND (e.xact_id, e.id) > (coalesce(head.xact_id, '0'), coalesce(head.event_id, 0))
                       ORDER BY e.xact_id, e.id LIMIT 1) waiting
"""


def audit_lag() -> timedelta | None:
    """Age of the oldest audit event that is not sealed yet; None when all are. Constant in their number.

    Above a minute the sealer is not running, or a transaction somewhere on the server stays open.
    """
    with connection.cursor() as cursor:
        cursor.execute(_LAG)
        return cursor.fetchone()[0]


def last_proof() -> Proof | None:
    """What the last nightly run found, None before the first. One row is read."""
    row = Verification.objects.first()
    if row is None:
        return None
    return Proof(row.ok, row.finished_at, [check["name"] for check in row.checks if not check["ok"]])
