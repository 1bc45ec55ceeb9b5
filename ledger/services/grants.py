"""Credit with terms of its own: granted, revoked, expired, booked as an expense when used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.db import transaction
from djmoney.money import Money

from ledger.models import Account, CreditGrant
from ledger.services.accounts import platform_account
from ledger.services.calls import call
from ledger.services.trail import record_audit_event

DEFAULT_PRIORITY = 50
# What pays for a grant. Promised credit is deferred until it is used; paid credit came in through the bank,
# unless the caller names the clearing account that it came through.
FUNDING = {
    CreditGrant.Kind.PAID: "bank",
    CreditGrant.Kind.PROMOTIONAL: "promo_deferred",
    CreditGrant.Kind.REFUND: "usage_revenue",
    CreditGrant.Kind.SLA: "sla_credits",
}


@dataclass(frozen=True, slots=True)
class GrantedCredit:
    """`replayed`: the key had been used for the same grant, and this is it."""

    grant_id: int
    journal_id: int
    replayed: bool


@transaction.atomic
def grant_credit(
    *,
    account: Account,
    kind: CreditGrant.Kind,
    amount: Money,
    key: str,
    actor: str,
    expires_at: datetime | None = None,
    priority: int = DEFAULT_PRIORITY,
    note: str = "",
    funding: str = "",
    request_id: str = "",
) -> GrantedCredit:
    """Gives a wallet credit with terms, once per key; `funding` names an account of the chart.

    Raises IdempotencyConflict for other terms under the same key, and BadPosting.
    """
    paid_by = platform_account(code=funding or FUNDING[kind], currency=str(amount.currency))
    (row,) = call(
        "SELECT grant_id, journal_id, replayed FROM credit_grant_create(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        [account.pk, paid_by.pk, kind.value, amount.amount, str(amount.currency), priority, expires_at, key, note,
         actor],
    )  # fmt: skip
    granted = GrantedCredit(*row)
    if not granted.replayed:
        record_audit_event(
            actor=actor,
            action="credit.granted",
            object_type="credit_grant",
            object_id=str(granted.grant_id),
            after={
                "account": account.code,
                "kind": kind.value,
                "amount": str(amount.amount),
                "currency": str(amount.currency),
                "expires_at": expires_at,
                "priority": priority,
                "note": note,
            },
            request_id=request_id,
        )
    return granted


@transaction.atomic
def revoke_grant(*, grant_id: int, reason: str, actor: str, request_id: str = "") -> Decimal:
    """Takes back what is left of a grant, as far as no open hold needs it; gives the amount."""
    ((revoked,),) = call("SELECT grant_revoke(%s, %s, %s)", [grant_id, reason, actor])
    if revoked:
        record_audit_event(
            actor=actor,
            action="credit.revoked",
            object_type="credit_grant",
            object_id=str(grant_id),
            after={"amount": str(revoked), "reason": reason},
            request_id=request_id,
        )
    return Decimal(revoked)


def expire_due_grants(*, limit: int) -> int:
    """Books the end of grants whose time is over, of at most `limit` wallets; returns how many grants.

    What open holds may need stays until they are closed.
    """
    ((expired,),) = call("SELECT grant_expire_due(%s)", [limit])
    return int(expired)


def recognise_promotions(*, limit: int) -> int:
    """Books as an expense what was used of promotional grants since the last time; returns how many grants."""
    ((recognised,),) = call("SELECT grant_recognise(%s)", [limit])
    return int(recognised)
