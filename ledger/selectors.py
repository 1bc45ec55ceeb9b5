"""Every read of the books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

from django.db import connection
from django.db.models import Case, F, Q, Sum, When
from django.db.models.functions import Now

from ledger.models import Account, CreditGrant, Entry, Verification


@dataclass(frozen=True, slots=True)
class Wallet:
    """`available` = posted - held - floor, without credit that has expired: what may be spent.

    `granted` is the part of posted that has terms of its own (see `open_grants`); `pending` was captured by a
    payment provider that keeps it for now. All in `currency`.
    """

    account_id: int
    currency: str
    posted: Decimal
    held: Decimal
    available: Decimal
    granted: Decimal = Decimal(0)
    pending: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True)
class OpenGrant:
    """Credit with terms that may still be spent."""

    id: int
    kind: str
    amount: Decimal
    remaining: Decimal
    currency: str
    priority: int
    expires_at: datetime | None
    note: str


@dataclass(frozen=True, slots=True)
class TrialBalanceRow:
    """What is posted on an account: > 0 a credit balance, < 0 a debit balance."""

    account_id: int
    code: str
    type: str
    currency: str
    posted: Decimal


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
    lines: int  # of metered usage that the journal nets on this account; 1 for other journals


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


_WALLETS = """
SELECT a.code, a.id, a.currency, b.posted, b.held,
       CASE WHEN b.granted = 0 THEN b.posted - b.held - b.floor
            ELSE greatest(0, b.posted - b.held - b.floor - (
                SELECT coalesce(sum(g.remaining), 0) FROM credit_grant g
                 WHERE g.account_id = a.id AND g.remaining > 0 AND g.expires_at <= clock_timestamp())) END,
       b.granted,
       (SELECT coalesce(sum(t.amount), 0) FROM ledger_top_up t WHERE t.account_id = a.id AND t.state = 'pending')
  FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id WHERE a.code = ANY(%s)
"""


def wallet(code: str) -> Wallet:
    """One query, whatever the wallet's history. Raises Account.DoesNotExist."""
    found = wallets([code])
    if code not in found:
        raise Account.DoesNotExist(f"there is no wallet {code!r}")
    return found[code]


def wallets(codes: Sequence[str]) -> dict[str, Wallet]:
    """Those wallets by code, in one query; a code that names none is left out."""
    with connection.cursor() as cursor:
        cursor.execute(_WALLETS, [list(codes)])
        return {code: Wallet(*rest) for code, *rest in cursor.fetchall()}


def open_grants(*, account_id: int) -> list[OpenGrant]:
    """The grants of a wallet that may be drawn on, in the order of draws; what else it has is paid credit."""
    promotional_first = Case(When(kind=CreditGrant.Kind.PROMOTIONAL, then=0), default=1)
    rows = (
        CreditGrant.objects.filter(account_id=account_id, remaining__gt=0)
        .filter(Q(expires_at__isnull=True) | Q(expires_at__gt=Now()))
        .order_by(promotional_first, F("expires_at").asc(nulls_last=True), "priority", "id")
        .values_list("id", "kind", "amount", "remaining", "amount_currency", "priority", "expires_at", "note")
    )
    return [OpenGrant(*row) for row in rows]


# A wallet's balance is kept; that of an account of the platform is its total and what came after it.
POSTED = """
       coalesce(b.posted, coalesce(t.posted, 0) + coalesce((
           SELECT sum(e.amount) FROM ledger_entries e
            WHERE e.account_id = a.id AND e.id > coalesce(t.up_to_entry, 0)), 0))
  FROM ledger_account a
  LEFT JOIN ledger_balance b ON b.account_id = a.id LEFT JOIN ledger_account_total t ON t.account_id = a.id
"""


def account_balance(account: Account) -> Decimal:
    """What is posted on the account, > 0 a credit balance."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {POSTED} WHERE a.id = %s", [account.pk])
        return cursor.fetchone()[0]


def trial_balance() -> list[TrialBalanceRow]:
    """Every account and what is posted on it now, by type and code. Per currency the sum is zero."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT a.id, a.code, a.type, a.currency, {POSTED} ORDER BY a.type, a.code")
        return [TrialBalanceRow(*row) for row in cursor.fetchall()]


def balance_as_of(*, account_id: int, moment: datetime) -> Decimal:
    """What is on the account of journals with `effective_at` <= moment, whenever they were posted.

    Reads the account's entries: for reports, not for decisions.
    """
    return Entry.objects.filter(account_id=account_id, journal__effective_at__lte=moment).aggregate(
        total=Sum("amount", default=Decimal(0))
    )["total"]


# A wallet's entries carry their balance. On an account of the platform it is counted back from its total, or
# from the sum of what is older than the page; one snapshot, one query.
_PAGE = """
WITH page AS (
    SELECT e.id, e.journal_id, e.amount, e.amount_currency, e.balance
      FROM ledger_entries e
     WHERE e.account_id = %(account)s AND (%(before)s::bigint IS NULL OR e.id < %(before)s::bigint)
     ORDER BY e.id DESC LIMIT %(limit)s
), first AS (
    SELECT min(id) AS id FROM page HAVING bool_or(balance IS NULL)
), older AS (
    SELECT CASE WHEN t.up_to_entry < f.id
                THEN t.posted + (SELECT coalesce(sum(e.amount), 0) FROM ledger_entries e
                                  WHERE e.account_id = %(account)s AND e.id > t.up_to_entry AND e.id < f.id)
                ELSE (SELECT coalesce(sum(e.amount), 0) FROM ledger_entries e
                       WHERE e.account_id = %(account)s AND e.id < f.id) END AS total
      FROM first f LEFT JOIN ledger_account_total t ON t.account_id = %(account)s
)
SELECT p.id, j.public_id, j.kind, p.amount,
       coalesce(p.balance, (SELECT total FROM older) + sum(p.amount) OVER (ORDER BY p.id)),
       p.amount_currency, j.effective_at, j.created_at, coalesce((j.meta ->> 'lines')::int, 1)
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
