"""Turns usage into money: claim, rate, charge, mark, all in one transaction.

The answers of a wallet that are charged together become lines of one journal. A worker that dies anywhere leaves
nothing behind: the claim is a row lock, and journals, lines and marks commit together. Two more guards stand behind
that: the ledger takes each line once, and a usage row is marked only while it is unmarked.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.db import connection, transaction
from django.db.models import QuerySet

from brokerage.models import UsageEvent
from brokerage.services.rating import rate_answer
from ledger.errors import LedgerError
from ledger.models import Account
from ledger.services import DeliveredLine, charge_lines, void_hold

logger = logging.getLogger(__name__)

EVENT_PREFIX = "answer:"
_ACTOR = "system:charge"


@dataclass(frozen=True, slots=True)
class Bill:
    """A claimed answer and its price."""

    usage: UsageEvent
    amount: Decimal


def charge_usage(*, limit: int) -> int:
    """Charges at most `limit` answers, the oldest first; returns how many. Any number may run at once.

    An answer that the books refuse is logged and stays uncharged; the others are not held up by it.
    """
    with transaction.atomic():
        bills = [_bill(usage) for usage in _claim(limit)]
        paid = _charge([bill for bill in bills if bill.amount > 0])
        _mark(paid)
        _touch_keys(paid)
    free = [bill for bill in bills if bill.amount == 0]
    return len(paid) + _close_free(free)


def _claim(limit: int) -> Sequence[UsageEvent]:
    # Other workers skip what this one has claimed; the index usage_uncharged serves the order.
    uncharged = UsageEvent.objects.filter(charged_at__isnull=True).order_by("created_at")
    return list(_locked(uncharged).select_related("price", "customer", "served_model")[:limit])


def _locked(usage: QuerySet[UsageEvent]) -> QuerySet[UsageEvent]:
    return usage.select_for_update(skip_locked=True, of=("self",), no_key=True)


def _bill(usage: UsageEvent) -> Bill:
    amount = rate_answer(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        prompt_rate=usage.price.prompt_rate,
        completion_rate=usage.price.completion_rate,
    )
    return Bill(usage, amount)


def _charge(bills: Sequence[Bill]) -> list[tuple[Bill, int]]:
    """Each bill with its journal."""
    wallets = _wallet_ids(bills)
    lines = [_line(bill, wallets[bill.usage.customer_id]) for bill in bills]
    try:
        journals = charge_lines(lines, actor=_ACTOR)
    except LedgerError:
        journals = _charge_by_wallet(lines)
    return [
        (bill, journals[line.event_id])
        for bill, line in zip(bills, lines, strict=True)
        if line.event_id in journals
    ]


def _charge_by_wallet(lines: Sequence[DeliveredLine]) -> dict[str, int]:
    """One of them is refused: finds out which, and charges the rest."""
    of_wallet = defaultdict(list)
    for line in lines:
        of_wallet[line.account_id].append(line)
    journals: dict[str, int] = {}
    # In the order in which the ledger locks wallets, so that two workers cannot wait for each other.
    for _, own in sorted(of_wallet.items()):
        try:
            journals |= charge_lines(own, actor=_ACTOR)
        except LedgerError as error:
            if len(own) > 1:
                for line in own:
                    journals |= _charge_by_wallet([line])
            else:
                logger.error("%s stays uncharged: %s", own[0].event_id, error)
    return journals


def _line(bill: Bill, wallet_id: int) -> DeliveredLine:
    usage = bill.usage
    return DeliveredLine(
        event_id=f"{EVENT_PREFIX}{usage.pk}",
        account_id=wallet_id,
        sku=usage.served_model.name,
        quantity=Decimal(usage.prompt_tokens + usage.completion_tokens),
        amount=bill.amount,
        currency=usage.currency,
        occurred_at=usage.finished_at,
        hold_id=usage.hold_id,
    )


def _wallet_ids(bills: Sequence[Bill]) -> dict[UUID, int]:
    codes = {bill.usage.customer_id: bill.usage.customer.wallet_code for bill in bills}
    ids = dict(Account.objects.filter(code__in=set(codes.values())).values_list("code", "pk"))
    return {customer: ids[code] for customer, code in codes.items()}


def _mark(paid: Sequence[tuple[Bill, int | None]]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE usage_event u SET amount = v.amount, journal_id = v.journal_id, charged_at = now()"
            " FROM unnest(%s::uuid[], %s::numeric[], %s::bigint[]) AS v (request_id, amount, journal_id)"
            " WHERE u.request_id = v.request_id AND u.charged_at IS NULL",
            [
                [bill.usage.pk for bill, _ in paid],
                [bill.amount for bill, _ in paid],
                [journal_id for _, journal_id in paid],
            ],
        )
        # They were claimed under a lock, so this can only fail if the claim did not hold.
        assert cursor.rowcount == len(paid)


def _touch_keys(paid: Sequence[tuple[Bill, int]]) -> None:
    """When a key was last used, to be shown to its owner. A key that another worker touches is left to it."""
    last_used: dict[UUID, datetime] = {}
    for bill, _ in paid:
        key, at = bill.usage.api_key_id, bill.usage.finished_at
        last_used[key] = max(at, last_used.get(key, at))
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE brokerage_apikey k SET last_used_at = v.at"
            " FROM unnest(%s::uuid[], %s::timestamptz[]) AS v (id, at)"
            " WHERE k.id = v.id AND (k.last_used_at IS NULL OR k.last_used_at < v.at) AND k.id IN"
            " (SELECT id FROM brokerage_apikey WHERE id = ANY (%s) FOR NO KEY UPDATE SKIP LOCKED)",
            [list(last_used), list(last_used.values()), list(last_used)],
        )


def _close_free(bills: Sequence[Bill]) -> int:
    """Answers that cost nothing: no journal, and what was held is released.

    In a transaction of their own: the ledger locks wallets in order, and the posting above had its turn.
    """
    if not bills:
        return 0
    with transaction.atomic():
        again = UsageEvent.objects.filter(pk__in=[bill.usage.pk for bill in bills], charged_at__isnull=True)
        mine = set(_locked(again).values_list("pk", flat=True))
        closing = [bill for bill in bills if bill.usage.pk in mine]
        wallets = _wallet_ids(closing)
        for bill in sorted(closing, key=lambda bill: wallets[bill.usage.customer_id]):
            if bill.usage.hold_id is not None:
                void_hold(hold_id=bill.usage.hold_id)
        _mark([(bill, None) for bill in closing])
    return len(closing)
