"""Paying providers of compute: their bills, and bank transfers: intent, order at the bank, proof by its statement.

PayPal's server SDK has no payouts and providers of compute take bank transfers, so the bank is the rail and
its reference the proof (docs/decisions/0016-payouts-by-bank.md). Nothing is booked before the proof; one reference
of the bank pays once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.db import connection, transaction
from django.db.models import Sum
from django.db.models.functions import Now
from djmoney.money import Money

from ledger import services
from ledger.errors import BadPosting, IdempotencyConflict
from ledger.models import Journal, Payout, Settlement
from ledger.selectors import account_balance

State = Payout.State


BILL_SCOPE = "provider.bill"


@dataclass(frozen=True, slots=True)
class Owed:
    """To one payee in one currency: `left` is neither paid nor on its way."""

    payee: str
    currency: str
    billed: Decimal
    under_way: Decimal
    paid: Decimal

    @property
    def left(self) -> Decimal:
        return self.billed - self.under_way - self.paid

    @property
    def left_text(self) -> str:
        return f"{self.left.normalize():f}"


_OWED = """
WITH bills AS (
    SELECT j.meta ->> 'payee' AS payee, j.currency, sum(e.amount) AS billed
      FROM ledger_journal j
      JOIN ledger_entries e ON e.journal_id = j.id
      JOIN ledger_account a ON a.id = e.account_id AND a.code = 'provider_payable:' || j.currency
     WHERE j.idem_scope = 'provider.bill'
       AND NOT EXISTS (SELECT 1 FROM ledger_journal r WHERE r.reverses_id = j.id)
     GROUP BY 1, 2
), payouts AS (
    SELECT payee, amount_currency AS currency,
           sum(amount) FILTER (WHERE state IN ('intended', 'sent')) AS under_way,
           sum(amount) FILTER (WHERE state = 'paid') AS paid
      FROM ledger_payout GROUP BY 1, 2
)
SELECT payee, currency, coalesce(b.billed, 0), coalesce(p.under_way, 0), coalesce(p.paid, 0)
  FROM bills b FULL JOIN payouts p USING (payee, currency)
 ORDER BY payee, currency
"""


def owed_to_payees() -> list[Owed]:
    """What each payee has billed and got. One query."""
    with connection.cursor() as cursor:
        cursor.execute(_OWED)
        return [Owed(*row) for row in cursor.fetchall()]


def book_bill(*, payee: str, number: str, amount: Money, reason: str, actor: str) -> services.PostedJournal:
    """A provider's bill becomes what we owe. Each number of a payee's once.

    Raises IdempotencyConflict when it is booked already, ValueError without payee or number, BadPosting.
    """
    if not payee.strip() or not number.strip():
        raise ValueError("a bill has a payee and a number")
    key = f"{payee}:{number}"
    if Journal.objects.filter(idem_scope=BILL_SCOPE, idem_key=key).exists():
        raise IdempotencyConflict(f"bill {number!r} of {payee} is booked already", fields=["number"])
    currency = str(amount.currency)
    cost = services.platform_account(code="provider_cost", currency=currency)
    owed = services.platform_account(code="provider_payable", currency=currency)
    return services.post_journal(
        scope=BILL_SCOPE,
        key=key,
        kind="provider_bill",
        currency=currency,
        lines=[services.Line(cost.pk, -amount.amount), services.Line(owed.pk, amount.amount)],
        actor=actor,
        meta={"payee": payee, "number": number, "reason": reason},
    )


def payable(currency: str) -> Decimal:
    """What we owe providers and no open payout is going to pay: what a new payout may be at most."""
    owed = account_balance(services.platform_account(code="provider_payable", currency=currency))
    under_way = Payout.objects.filter(state__in=Payout.OPEN, amount_currency=currency).aggregate(
        total=Sum("amount", default=Decimal(0))
    )["total"]
    return owed - under_way


def start_payout(*, payee: str, amount: Money, actor: str, idempotency_key: str, note: str = "") -> Payout:
    """The payout under that key, before anything is told to the bank.

    Raises BadPosting (more than we owe), IdempotencyConflict, ValueError (no payee).
    """
    if not payee.strip():
        raise ValueError("a payout needs a payee")
    with transaction.atomic():
        _lock()
        payout = Payout.objects.filter(idempotency_key=idempotency_key).first()
        if payout is not None:
            if (payout.payee, payout.amount) != (payee, amount):
                raise IdempotencyConflict(
                    f"payout {idempotency_key!r} exists with another payee or amount",
                    fields=["payee", "amount"],
                )
            return payout
        left = payable(str(amount.currency))
        if amount.amount <= 0 or amount.amount > left:
            raise BadPosting(
                f"a payout is above zero and at most the {left.normalize():f} {amount.currency} owed"
            )
        payout = Payout(
            payee=payee, amount=amount, idempotency_key=idempotency_key, note=note[:500], actor=actor
        )
        payout.save()
        _audit(payout, "payout.start", actor)
    return payout


def mark_payout_sent(*, payout_id: int, actor: str) -> Payout:
    """The bank has the order. Raises ValueError unless it is only intended."""
    with transaction.atomic():
        return _move(payout_id, State.SENT, [State.INTENDED], actor)


def confirm_payout(*, payout_id: int, bank_reference: str, paid_at: datetime, actor: str) -> Payout:
    """The bank's statement shows it: booked, once per reference of the bank.

    Raises IdempotencyConflict when that reference paid something else, ValueError when it is cancelled or
    was confirmed with another reference.
    """
    if not bank_reference.strip():
        raise ValueError("the reference of the bank's statement is the proof")
    with transaction.atomic():
        _lock()
        payout = Payout.objects.select_for_update(no_key=True).get(pk=payout_id)
        if payout.state == State.PAID and payout.bank_reference == bank_reference:
            return payout
        used = Settlement.objects.filter(provider="bank", kind="payout", external_id=bank_reference)
        if used.exists():
            raise IdempotencyConflict(
                f"the bank's reference {bank_reference!r} has paid another payout", fields=["bank_reference"]
            )
        moved = _move(payout_id, State.PAID, Payout.OPEN, actor, bank_reference=bank_reference)
        currency = str(payout.amount.currency)
        services.settle_transfer(
            provider="bank",
            kind="payout",
            external_id=bank_reference,
            credit=services.platform_account(code="bank", currency=currency),
            debit=services.platform_account(code="provider_payable", currency=currency),
            amount=payout.amount,
            actor=actor,
            meta={"payout": str(payout.public_id), "payee": payout.payee},
            effective_at=paid_at,
        )
    return moved


def cancel_payout(*, payout_id: int, reason: str, actor: str) -> Payout:
    """Never sent, or sent back by the bank: what we owe stays owed. Raises ValueError when it is paid."""
    if not reason.strip():
        raise ValueError("a cancelled payout needs a reason")
    with transaction.atomic():
        return _move(payout_id, State.CANCELLED, Payout.OPEN, actor, note=reason[:500])


def _move(payout_id: int, state: State, before: Sequence[State], actor: str, **fields: str) -> Payout:
    moved = Payout.objects.filter(pk=payout_id, state__in=before).update(
        state=state, changed_at=Now(), **fields
    )
    payout = Payout.objects.get(pk=payout_id)
    if not moved:
        raise ValueError(f"{payout} is {payout.state}, it cannot become {state.value}")
    _audit(payout, f"payout.{state.value}", actor)
    return payout


def _audit(payout: Payout, action: str, actor: str) -> None:
    services.record_audit_event(
        actor=actor,
        action=action,
        object_type="payout",
        object_id=str(payout.public_id),
        after={
            "payee": payout.payee, "amount": str(payout.amount.amount), "currency": str(payout.amount.currency),
            "bank_reference": payout.bank_reference, "note": payout.note,
        },
    )  # fmt: skip


def _lock() -> None:
    """One decision about payouts at a time: two that fit alone may be too much together."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('ledger_payout'))")
