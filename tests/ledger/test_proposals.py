"""Corrections by hand: one proposes, another decides, and the database holds both to it."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from djmoney.money import Money

from ledger.errors import InsufficientFunds, LedgerError
from ledger.models import Account, AuditEvent, Journal, PeriodClose, Proposal
from ledger.proposals.services import ProposalRefused, approve, propose, reject
from ledger.selectors import wallet
from ledger.services import post_journal
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet, spend

pytestmark = pytest.mark.django_db
WHY = "Ticket 4711: the customer was charged twice."


def adjustment(team: Account, amount: str = "5", *, actor: str = "user:ann", reason: str = WHY) -> Proposal:
    return propose(
        kind=Proposal.Kind.ADJUSTMENT,
        summary=f"{amount} USD",
        payload={"counter": "promo_expense"},
        account=team,
        amount=Money(amount, "USD"),
        reason=reason,
        actor=actor,
    )


def agreed(proposal: Proposal, *, actor: str = "user:bob", may_exceed_limit: bool = False) -> Proposal:
    return approve(proposal=proposal, actor=actor, may_exceed_limit=may_exceed_limit, note="seen")


def test_a_proposal_moves_nothing_until_another_person_approves_it():
    team = make_wallet("10")
    proposal = adjustment(team)
    assert wallet(team.code).posted == 10
    done = agreed(proposal)
    assert wallet(team.code).posted == 15
    assert (done.state, done.decided_by, done.journal.kind) == ("approved", "user:bob", "adjustment")
    assert done.journal.meta == {"reason": WHY}
    assert done.journal.idem_key == f"proposal:{proposal.public_id}"
    assert all(check.ok for check in verify_books())


def test_nobody_approves_what_they_proposed():
    team = make_wallet()
    proposal = adjustment(team)
    with pytest.raises(ProposalRefused, match="another person"):
        agreed(proposal, actor="user:ann")
    assert wallet(team.code).posted == 0


def test_the_database_itself_wants_two_people():
    proposal = adjustment(make_wallet())
    with pytest.raises(IntegrityError, match="proposal_by_two_people"), transaction.atomic():
        Proposal.objects.filter(pk=proposal.pk).update(
            state="approved", decided_by="user:ann", decided_at="2026-01-01T00:00Z"
        )


@pytest.mark.parametrize("reason", ["", "because", " " * 40])
def test_a_reason_that_says_nothing_is_refused(reason):
    with pytest.raises(ProposalRefused, match="at least 10"):
        adjustment(make_wallet(), reason=reason)
    assert not Proposal.objects.exists()


def test_above_the_limit_somebody_with_the_right_has_to_approve(settings):
    settings.LEDGER_PROPOSAL_LIMIT = Decimal(100)
    team = make_wallet("500")
    for amount in ("100.000000001", "-100.000000001"):
        proposal = adjustment(team, amount)
        with pytest.raises(ProposalRefused, match="above the limit of 100"):
            agreed(proposal)
        agreed(proposal, may_exceed_limit=True)
    agreed(adjustment(team, "100"))
    assert wallet(team.code).posted == 600


def test_what_the_books_refuse_leaves_the_proposal_open():
    team = make_wallet("3")
    proposal = adjustment(team, "-5")
    with pytest.raises(InsufficientFunds):
        agreed(proposal)
    proposal.refresh_from_db()
    assert (proposal.state, proposal.decided_by) == ("open", "")
    assert wallet(team.code).posted == 3


def test_a_decision_is_made_once():
    team = make_wallet()
    proposal = adjustment(team)
    agreed(proposal)
    with pytest.raises(ProposalRefused, match="approved already, by user:bob"):
        agreed(proposal, actor="user:eve")
    with pytest.raises(ProposalRefused, match="approved already"):
        reject(proposal=proposal, actor="user:eve", note="")
    assert wallet(team.code).posted == 5


@pytest.mark.parametrize(("actor", "state"), [("user:ann", "withdrawn"), ("user:bob", "rejected")])
def test_one_takes_back_ones_own_and_rejects_anothers(actor, state):
    proposal = reject(proposal=adjustment(make_wallet()), actor=actor, note="not so")
    assert (proposal.state, proposal.note) == (state, "not so")
    assert not Journal.objects.filter(kind="adjustment").exists()


def test_a_reversal_takes_the_journal_back(revenue):
    team = make_wallet("10")
    posted = post_journal(
        scope="t", key="1", kind="usage", currency="USD", lines=spend(team, revenue, "4"), actor="test"
    )
    proposal = propose(
        kind=Proposal.Kind.REVERSAL, summary="j", payload={"journal": posted.journal_id}, reason=WHY, actor="user:ann"
    )  # fmt: skip
    assert agreed(proposal).journal.reverses_id == posted.journal_id
    assert wallet(team.code).posted == 10


def test_a_period_is_closed_by_two():
    proposal = propose(
        kind=Proposal.Kind.CLOSE_PERIOD, summary="c", payload={"through": "2020-12-31"}, reason=WHY,
        actor="user:ann",
    )  # fmt: skip
    agreed(proposal)
    assert str(PeriodClose.objects.get().closed_through) == "2020-12-31"
    again = propose(
        kind=Proposal.Kind.CLOSE_PERIOD, summary="c", payload={"through": "2999-12-31"}, reason=WHY,
        actor="user:ann",
    )  # fmt: skip
    with pytest.raises(LedgerError, match="is not"):
        agreed(again)


def test_every_step_is_in_the_audit_trail():
    proposal = agreed(adjustment(make_wallet()))
    steps = AuditEvent.objects.filter(object_id=str(proposal.public_id)).order_by("id")
    assert [(step.action, step.actor) for step in steps] == [
        ("proposal.made", "user:ann"),
        ("proposal.approved", "user:bob"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        "amount = amount * 10",
        "payload = '{}'",
        "reason = 'something else entirely'",
        "proposed_by = 'user:eve'",
    ],
)
def test_what_was_proposed_cannot_be_changed_afterwards(change):
    proposal = adjustment(make_wallet())
    with pytest.raises(DatabaseError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE ledger_proposal SET {change} WHERE id = %s", [proposal.pk])


@pytest.mark.parametrize(
    "statement",
    ["UPDATE ledger_proposal SET state = 'open'", "UPDATE ledger_proposal SET note = 'never said'",
     "DELETE FROM ledger_proposal", "TRUNCATE ledger_proposal"],
)  # fmt: skip
def test_what_is_decided_stays_decided(statement):
    agreed(adjustment(make_wallet()))
    with pytest.raises(DatabaseError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)


def test_nothing_begins_decided():
    with pytest.raises(DatabaseError, match="begins open"), transaction.atomic():
        Proposal.objects.create(
            kind="adjustment", summary="s", payload={}, reason=WHY, proposed_by="user:ann", state="approved",
            decided_by="user:bob", decided_at="2026-01-01T00:00Z",
        )  # fmt: skip
