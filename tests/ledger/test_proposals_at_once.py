"""Ten clerks press the same button."""

from __future__ import annotations

from ledger.models import Proposal
from ledger.proposals.services import ProposalRefused
from ledger.selectors import wallet
from tests.ledger.conftest import make_wallet
from tests.ledger.test_concurrency import at_once
from tests.ledger.test_proposals import adjustment, agreed


def test_ten_people_approve_at_once_and_it_is_done_once(fresh_database):
    team = make_wallet()
    proposal = adjustment(team)

    def decide(n: int) -> str:
        try:
            return agreed(Proposal.objects.get(pk=proposal.pk), actor=f"user:{n}").state
        except ProposalRefused:
            return "refused"

    outcomes = at_once(decide, 10)
    assert sorted(outcomes) == ["approved", *["refused"] * 9]
    assert wallet(team.code).posted == 5
