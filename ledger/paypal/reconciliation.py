"""Our settlements against PayPal's own list, one UTC day at a time, in both directions and with the fees.

A movement that PayPal lists and we have not booked is booked here when its meaning is plain: then only its
event was lost. What is left, and what we booked without PayPal listing it, becomes a difference for a person.
Both sides are compared by PayPal's time of the movement. Nothing that is booked is ever changed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

from django.db import transaction
from django.db.models import Sum as Total
from django.db.models.functions import Now
from django.utils import timezone
from djmoney.money import Money

from ledger import services
from ledger.errors import LedgerError
from ledger.models import Account, Difference, Entry, Reconciliation, Settlement, TopUp
from ledger.paypal.gateway import Capture, CaptureStatus, Return, ReturnKind, ReturnStatus
from ledger.paypal.orders import book_capture, settle_top_up
from ledger.paypal.reports import Movement, read_balances, read_movements
from ledger.paypal.returns import book_return

logger = logging.getLogger(__name__)

PROVIDER = "paypal"
ACTOR = "system:reconciliation"
# Clocks and PayPal's rounding to the second: what we count to a day may stand just outside of it in the list.
MARGIN = timedelta(hours=1)
Kind = Difference.Kind

# PayPal's event codes whose meaning is plain.
_PAYMENT_GROUP = "T00"
_RETURNS = {
    "T1107": ReturnKind.REFUND,
    "T1106": ReturnKind.REVERSAL,
    "T1201": ReturnKind.REVERSAL,
    "T1202": ReturnKind.REVERSAL_CANCELLED,
}
# Event code -> kind of settlement, account that money leaves, account that it goes to.
_TRANSFERS = {
    "T0106": ("provider_fee", "paypal_clearing", "dispute_fees"),
    "T1110": ("dispute_held", "paypal_clearing", "paypal_dispute_held"),
    "T1111": ("dispute_freed", "paypal_dispute_held", "paypal_clearing"),
}
_CONVERSION_GROUP = "T02"
_WITHDRAWAL_GROUP = "T04"
_WITHDRAWAL = ("withdrawal", "paypal_clearing", "bank")
# What a settlement did to our balance at PayPal; the fee has the opposite sign.
_CAME_IN = frozenset({"capture", "reversal_cancelled", "refund_failed", "dispute_freed"})


@dataclass(frozen=True, slots=True)
class Sum:
    """All that happened under one id, signed: above zero came to us."""

    currency: str
    gross: Decimal
    fee: Decimal


def reconcile_day(*, day: date) -> Reconciliation:
    """Compares one UTC day that is over. May be repeated. Raises GatewayUnavailable, GatewayRefused, ValueError."""
    started_at = timezone.now()
    start = datetime.combine(day, time(), UTC)
    end = start + timedelta(days=1)
    if end > started_at:
        raise ValueError(f"{day} is not over yet")
    listed = list(read_movements(start=start - MARGIN, end=end + MARGIN))
    # Conversions have no row of their own here: the balances of both currencies prove them.
    listed = [movement for movement in listed if not movement.code.startswith(_CONVERSION_GROUP)]
    of_day = [movement for movement in listed if start <= movement.occurred_at < end]
    healed, problems = _heal(of_day)
    theirs = _their_sums(listed)
    today = {movement.external_id: movement.code for movement in of_day}
    ours_of_day = set(
        Settlement.objects.filter(provider=PROVIDER, occurred_at__gte=start, occurred_at__lt=end).values_list(
            "external_id", flat=True
        )
    )
    ours = _our_sums({*theirs, *ours_of_day})
    found = [
        _difference(day, external_id, theirs.get(external_id), ours.get(external_id), today, problems)
        for external_id in sorted({*today, *ours_of_day})
        if theirs.get(external_id) != ours.get(external_id)
    ]
    found += _balance_differences(day, end)
    return _store(day, found, theirs=len(today), ours=len(ours_of_day), healed=healed, started_at=started_at)


def resolve_difference(*, difference_id: int, resolution: str, actor: str) -> Difference:
    """Closes a difference that somebody explained. What had to be booked is booked by then, by its own service.

    Raises ValueError without an explanation, or when it is closed already.
    """
    if not resolution.strip():
        raise ValueError("a difference is resolved by saying what it was")
    with transaction.atomic():
        moved = Difference.objects.filter(pk=difference_id, resolved_at__isnull=True).update(
            resolved_at=Now(), resolved_by=actor, resolution=resolution[:500]
        )
        if not moved:
            raise ValueError(f"difference {difference_id} is not open")
        services.record_audit_event(
            actor=actor,
            action="reconciliation.resolved",
            object_type="difference",
            object_id=str(difference_id),
            after={"resolution": resolution[:500]},
        )
    return Difference.objects.get(pk=difference_id)


def _heal(movements: list[Movement]) -> tuple[int, dict[str, str]]:
    """Books what PayPal lists and no event told us. Gives how many, and why the others could not be."""
    known = set(
        Settlement.objects.filter(
            provider=PROVIDER, external_id__in=[movement.external_id for movement in movements]
        ).values_list("external_id", flat=True)
    )
    healed, problems = 0, {}
    for movement in movements:
        if movement.external_id in known:
            continue
        try:
            if _book(movement):
                healed += 1
                logger.warning("booked %s %s: its event never came", movement.code, movement.external_id)
        except LedgerError as refusal:
            problems[movement.external_id] = str(refusal)
    return healed, problems


def _book(movement: Movement) -> bool:
    if movement.code in _RETURNS and movement.reference_id:
        book_return(provider=PROVIDER, told=_return(movement))
    elif movement.code in _TRANSFERS:
        _transfer(movement, *_TRANSFERS[movement.code])
    elif movement.code.startswith(_WITHDRAWAL_GROUP) and movement.gross < 0:
        _transfer(movement, *_WITHDRAWAL)
    elif movement.code.startswith(_PAYMENT_GROUP) and movement.gross > 0:
        top_up = _purchase(movement.invoice_id)
        if top_up is None:
            return False
        if top_up.rail == "ipn":  # where nothing can be asked for but this list
            book_capture(top_up=top_up, order_id=str(top_up.order_id), capture=_capture(movement))
        else:
            settle_top_up(top_up_id=top_up.pk)
    return Settlement.objects.filter(provider=PROVIDER, external_id=movement.external_id).exists()


def _return(movement: Movement) -> Return:
    return Return(
        external_id=movement.external_id,
        capture_id=movement.reference_id,
        kind=_RETURNS[movement.code],
        status=ReturnStatus.COMPLETED,
        currency=movement.currency,
        gross=abs(movement.gross),
        fee=abs(movement.fee),
        reference="",
        occurred_at=movement.occurred_at,
    )


def _transfer(movement: Movement, kind: str, leaves: str, goes_to: str) -> None:
    currency = movement.currency
    services.settle_transfer(
        provider=PROVIDER,
        kind=kind,
        external_id=movement.external_id,
        credit=services.platform_account(code=leaves, currency=currency),
        debit=services.platform_account(code=goes_to, currency=currency),
        amount=Money(abs(movement.gross), currency),
        actor=ACTOR,
        meta={"code": movement.code},
        effective_at=movement.occurred_at,
    )


def _capture(movement: Movement) -> Capture:
    return Capture(
        external_id=movement.external_id,
        status=CaptureStatus.COMPLETED,
        currency=movement.currency,
        gross=movement.gross,
        fee=-movement.fee,
        captured_at=movement.occurred_at,
    )


def _purchase(reference: str) -> TopUp | None:
    try:
        public_id = UUID(reference)
    except ValueError:
        return None
    return TopUp.objects.filter(public_id=public_id).first()


def _their_sums(movements: list[Movement]) -> dict[str, Sum]:
    sums: dict[str, Sum] = {}
    for movement in movements:
        before = sums.get(movement.external_id, Sum(movement.currency, Decimal(0), Decimal(0)))
        sums[movement.external_id] = Sum(
            movement.currency, before.gross + movement.gross, before.fee + movement.fee
        )
    return sums


def _our_sums(external_ids: set[str]) -> dict[str, Sum]:
    rows = Settlement.objects.filter(provider=PROVIDER, external_id__in=external_ids).values_list(
        "external_id", "kind", "currency", "gross", "fee"
    )
    totals: defaultdict[tuple[str, str], list[Decimal]] = defaultdict(lambda: [Decimal(0), Decimal(0)])
    for external_id, kind, currency, gross, fee in rows:
        sign = 1 if kind in _CAME_IN else -1
        totals[external_id, currency][0] += sign * gross
        totals[external_id, currency][1] -= sign * fee
    return {external_id: Sum(currency, *total) for (external_id, currency), total in totals.items()}


def _difference(
    day: date, external_id: str, theirs: Sum | None, ours: Sum | None, codes: dict[str, str], problems: dict[str, str]
) -> Difference:  # fmt: skip
    kind = (
        Kind.MISSING_HERE if ours is None else Kind.MISSING_THERE if theirs is None else Kind.FIGURES_DIFFER
    )
    known = theirs or ours
    assert known is not None
    detail = problems.get(external_id, "")
    if theirs and ours and theirs.currency != ours.currency:
        detail = f"PayPal has it in {theirs.currency}, we have it in {ours.currency}"
    return Difference(
        provider=PROVIDER,
        kind=kind,
        external_id=external_id,
        day=day,
        currency=known.currency,
        code=codes.get(external_id, ""),
        their_gross=theirs.gross if theirs else None,
        their_fee=theirs.fee if theirs else None,
        our_gross=ours.gross if ours else None,
        our_fee=ours.fee if ours else None,
        detail=detail[:300],
    )


def _balance_differences(day: date, end: datetime) -> list[Difference]:
    """PayPal's balance at the end of the day against the clearing account: the sum of all days before, too."""
    theirs = read_balances(at=end - timedelta(seconds=1))
    ours: defaultdict[str, Decimal] = defaultdict(Decimal)
    for account in Account.objects.filter(code__startswith="paypal_clearing:"):
        booked = Entry.objects.filter(account=account, journal__effective_at__lt=end)
        ours[account.currency] -= booked.aggregate(total=Total("amount", default=Decimal(0)))["total"]
    return [
        Difference(
            provider=PROVIDER, kind=Kind.BALANCE_DIFFERS, external_id=currency, day=day, currency=currency,
            their_gross=theirs.get(currency, Decimal(0)), our_gross=ours[currency],
        )
        for currency in sorted({*theirs, *ours})
        if theirs.get(currency, Decimal(0)) != ours[currency]
    ]  # fmt: skip


@transaction.atomic
def _store(
    day: date, found: list[Difference], *, theirs: int, ours: int, healed: int, started_at: datetime
) -> Reconciliation:
    figures = ["currency", "code", "their_gross", "their_fee", "our_gross", "our_fee", "detail", "seen_at"]
    for difference in found:
        difference.seen_at = started_at
    # What a person resolved stays resolved, however often it is met again.
    Difference.objects.bulk_create(
        found,
        update_conflicts=True,
        unique_fields=["provider", "kind", "external_id", "day"],
        update_fields=figures,
    )
    gone = Difference.objects.filter(
        provider=PROVIDER, day=day, resolved_at__isnull=True, seen_at__lt=started_at
    )
    gone.update(resolved_at=Now(), resolved_by=ACTOR, resolution="compared again: both sides agree now")
    still_open = Difference.objects.filter(provider=PROVIDER, day=day, resolved_at__isnull=True).count()
    if still_open:
        logger.error("PayPal's list of %s and our books differ in %s places", day, still_open)
    return Reconciliation.objects.create(
        provider=PROVIDER,
        day=day,
        theirs=theirs,
        ours=ours,
        healed=healed,
        differences=still_open,
        started_at=started_at,
    )
