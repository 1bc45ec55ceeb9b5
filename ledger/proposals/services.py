"""From a proposal to a decision. What each kind does is in `kinds`."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now
from djmoney.money import Money

from ledger.models import Account, Proposal
from ledger.models.proposals import REASON_MIN
from ledger.money import format_money
from ledger.proposals.kinds import carry_out
from ledger.services import record_audit_event


class ProposalRefused(Exception):
    """Not done, and why; nothing has changed."""


def propose(
    *,
    kind: Proposal.Kind,
    summary: str,
    payload: dict[str, Any],
    reason: str,
    actor: str,
    account: Account | None = None,
    amount: Money | None = None,
) -> Proposal:
    """Writes down what `actor` wants done. Raises ProposalRefused for a reason that says nothing."""
    reason = reason.strip()
    if len(reason) < REASON_MIN:
        raise ProposalRefused(f"Say why in at least {REASON_MIN} characters.")
    with transaction.atomic():
        proposal = Proposal.objects.create(
            kind=kind,
            summary=summary,
            payload=payload,
            account=account,
            amount=amount,
            reason=reason,
            proposed_by=actor,
        )
        _audit("proposal.made", proposal, actor, {"kind": kind, "summary": summary, "reason": reason})
    return proposal


def approve(*, proposal: Proposal, actor: str, may_exceed_limit: bool, note: str = "") -> Proposal:
    """Does what is proposed, in the transaction that decides it.

    Raises ProposalRefused when `actor` proposed it, the limit is exceeded or it was decided before, and
    LedgerError or ValueError when the books refuse: the proposal stays open then.
    """
    if proposal.proposed_by == actor:
        raise ProposalRefused("You proposed this: another person has to approve it.")
    if exceeds_limit(proposal.amount) and not may_exceed_limit:
        raise ProposalRefused(
            f"{format_money(proposal.amount)} is above the limit of {limit():f}: "
            "somebody with the right to approve large proposals has to decide."
        )
    with transaction.atomic():
        _decide(proposal, Proposal.State.APPROVED, actor, note)
        journal_id = carry_out(proposal)
        if journal_id is not None:
            Proposal.objects.filter(pk=proposal.pk).update(journal=journal_id)
        _audit("proposal.approved", proposal, actor, {"journal": journal_id, "note": note})
    proposal.refresh_from_db()
    return proposal


def reject(*, proposal: Proposal, actor: str, note: str) -> Proposal:
    """Declines somebody's proposal, or takes back one's own. Raises ProposalRefused if it was decided before."""
    own = proposal.proposed_by == actor
    state = Proposal.State.WITHDRAWN if own else Proposal.State.REJECTED
    with transaction.atomic():
        _decide(proposal, state, actor, note)
        _audit(f"proposal.{state}", proposal, actor, {"note": note})
    proposal.refresh_from_db()
    return proposal


def limit() -> Decimal:
    """What any approver may approve, per proposal, in the units of its currency."""
    return settings.LEDGER_PROPOSAL_LIMIT


def exceeds_limit(amount: Money | None) -> bool:
    return amount is not None and abs(amount.amount) > limit()


def _decide(proposal: Proposal, state: Proposal.State, actor: str, note: str) -> None:
    decided = Proposal.objects.filter(pk=proposal.pk, state=Proposal.State.OPEN).update(
        state=state, decided_by=actor, decided_at=Now(), note=note.strip()
    )
    if not decided:
        proposal.refresh_from_db()
        raise ProposalRefused(f"It is {proposal.state} already, by {proposal.decided_by}.")


def _audit(action: str, proposal: Proposal, actor: str, after: dict[str, Any]) -> None:
    record_audit_event(
        actor=actor, action=action, object_type="proposal", object_id=str(proposal.public_id), after=after
    )
