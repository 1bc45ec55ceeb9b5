"""Charging at delivery: lines of a wallet share a journal, and nobody pays more, less, or out of another grant for it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from djmoney.money import Money
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger.errors import BadPosting, HoldNotOpen, IdempotencyConflict, InsufficientFunds
from ledger.models import Account, CreditGrant, Hold, UsageLine
from ledger.selectors import account_balance, wallet
from ledger.services import (
    DeliveredLine,
    JournalRequest,
    charge_lines,
    create_hold,
    load_usage,
    platform_account,
    post_journals,
    post_usage,
    void_hold,
)
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet, spend
from tests.ledger.test_concurrency import at_once
from tests.ledger.test_grants import grant, left, let_expire
from tests.ledger.test_usage import line

Kind = CreditGrant.Kind
NOW = datetime.now(UTC)


def hold(team: Account, amount: str, key: str | None = None) -> int:
    placed = create_hold(
        account=team,
        amount=Money(amount, team.currency),
        key=key or uuid.uuid4().hex,
        ttl=timedelta(minutes=5),
        actor="test",
    )
    return placed.hold_id


def delivered(
    team: Account, event: str, amount: str, hold_id: int | None = None, **more: Any
) -> DeliveredLine:
    return DeliveredLine(
        event_id=event,
        account_id=team.pk,
        sku=more.get("sku", "tokens"),
        quantity=Decimal(more.get("quantity", 1)),
        amount=Decimal(amount),
        currency=more.get("currency", team.currency),
        occurred_at=NOW,
        hold_id=hold_id,
    )


def held_before_the_end_of_a_grant() -> tuple[Account, int, int]:
    """A wallet of 10 with a promised 5 that are over, and a hold of 2 from before. A slow machine is given more time."""
    for seconds in (0.5, 2, 8):
        team = make_wallet("10")
        promised = grant(team, Kind.PROMOTIONAL, "5", days=seconds / 86400)
        taken = hold(team, "2")
        in_time = Hold.objects.get(pk=taken).created_at < CreditGrant.objects.get(pk=promised).expires_at
        let_expire(promised)
        if in_time:
            return team, promised, taken
    raise AssertionError("a hold took more than 8 seconds")


def charge(*lines: DeliveredLine) -> dict[str, int]:
    return charge_lines(lines, actor="test")


def wrong() -> list[str]:
    return [result.name for result in verify_books() if not result.ok]


@pytest.mark.django_db
def test_lines_of_a_wallet_share_a_journal_and_capture_their_holds():
    team, other = make_wallet("10"), make_wallet("10")
    holds = [hold(team, "3"), hold(team, "2"), hold(other, "1")]
    journals = charge(
        delivered(team, "a", "1.5", holds[0]),
        delivered(other, "b", "1", holds[2]),
        delivered(team, "c", "0.5", holds[1]),
        delivered(team, "d", "0.25"),
    )
    assert journals["a"] == journals["c"] == journals["d"] != journals["b"]
    assert (wallet(team.code).posted, wallet(team.code).held) == (Decimal("7.75"), 0)
    assert (wallet(other.code).posted, wallet(other.code).held) == (9, 0)
    captured = Hold.objects.order_by("pk").values_list("state", "captured", "journal_id")
    assert list(captured) == [
        ("captured", Decimal("1.5"), journals["a"]),
        ("captured", Decimal("0.5"), journals["a"]),
        ("captured", Decimal(1), journals["b"]),
    ]
    assert wrong() == []


@pytest.mark.django_db
def test_again_moves_nothing_and_tells_the_same():
    team = make_wallet("10")
    first = delivered(team, "a", "1", hold(team, "1"))
    told = charge(first)
    again = charge(first, delivered(team, "b", "2", hold(team, "2")))
    assert again["a"] == told["a"] != again["b"]
    assert wallet(team.code).posted == 7
    for other in (delivered(team, "a", "2"), delivered(make_wallet("9"), "a", "1")):
        with pytest.raises(IdempotencyConflict, match='"a"'):
            charge(other, delivered(team, "c", "1"))
    assert UsageLine.objects.count() == 2


@pytest.mark.django_db
def test_a_line_that_waits_for_its_tick_is_not_charged_beside_it():
    team = make_wallet("10")
    load_usage([line(team, "a")])
    with pytest.raises(IdempotencyConflict):
        charge(delivered(team, "a", "1", quantity=2))
    post_usage(limit=1)
    assert wallet(team.code).posted == 9


@pytest.mark.django_db
def test_what_was_held_for_becomes_a_debt_and_what_was_not_is_refused():
    team = make_wallet("2")
    lost = hold(team, "2")
    void_hold(hold_id=lost)
    kept = hold(team, "1.5")
    charge(delivered(team, "a", "2", lost), delivered(team, "b", "1", kept))
    debt = Account.objects.get(code=f"customer_receivable:{team.pk}")
    assert (wallet(team.code).posted, wallet(team.code).held, account_balance(debt)) == (0, 0, -1)
    assert Hold.objects.get(pk=kept).captured == 1
    with pytest.raises(InsufficientFunds) as caught:
        charge(delivered(team, "c", "0.5"))
    assert caught.value.shortfall == Decimal("0.5")
    assert wrong() == []


@pytest.mark.django_db
def test_a_charge_above_its_hold_takes_what_is_there():
    team = make_wallet("2")
    charge(delivered(team, "a", "3", hold(team, "1")))
    assert wallet(team.code).posted == 0
    assert Hold.objects.get().captured == 1
    assert wrong() == []


@pytest.mark.django_db
def test_each_hold_draws_on_the_grants_of_its_own_time():
    """One hold from before the grant's end, one line from after it: together they must not draw more than the first."""
    team, promised, before = held_before_the_end_of_a_grant()
    after = hold(team, "4")
    journals = charge(delivered(team, "a", "1.5", before), delivered(team, "b", "4", after))
    assert journals["a"] != journals["b"]
    assert (left(promised), wallet(team.code).posted) == ([Decimal("3.5")], Decimal("9.5"))
    assert wrong() == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    "bad",
    [
        {"amount": "0"},
        {"amount": "-1"},
        {"amount": "0.0000000001"},
        {"currency": "EUR"},
        {"sku": ""},
        {"quantity": -1},
    ],
)
def test_a_malformed_line_stops_all(bad):
    team = make_wallet("10")
    with pytest.raises(BadPosting, match='"bad"'):
        charge(delivered(team, "good", "1"), delivered(team, "bad", bad.pop("amount", "1"), **bad))
    assert not UsageLine.objects.exists()


@pytest.mark.django_db
def test_a_hold_of_another_wallet_or_told_twice_stops_all():
    team, other = make_wallet("10"), make_wallet("10")
    theirs, ours = hold(other, "1"), hold(team, "1")
    with pytest.raises(HoldNotOpen):
        charge(delivered(team, "a", "1", theirs))
    with pytest.raises(HoldNotOpen):
        charge(delivered(team, "a", "1", 10**12))
    with pytest.raises(BadPosting, match="twice"):
        charge(delivered(team, "a", "1", ours), delivered(team, "b", "1", ours))
    with pytest.raises(BadPosting, match="twice"):
        charge(delivered(team, "a", "1"), delivered(team, "a", "1"))
    assert (wallet(team.code).held, wallet(other.code).held) == (1, 1)


def test_many_workers_charge_each_event_once(fresh_database):
    teams = [make_wallet("100") for _ in range(3)]
    holds = {n: hold(teams[n % 3], "1") for n in range(60)}

    def work(number: int) -> int:
        mine = [(number * 7 + step) % 60 for step in range(30)]
        return len(charge(*(delivered(teams[n % 3], f"{n}", "0.5", holds[n]) for n in sorted(mine))))

    at_once(work, 12)
    assert UsageLine.objects.count() == 60
    assert [(wallet(team.code).posted, wallet(team.code).held) for team in teams] == [(90, 0)] * 3
    assert wrong() == []


MOVES = st.lists(
    st.tuples(
        st.integers(0, 2),  # wallet
        st.integers(1, 40),  # amount
        st.integers(0, 10),  # how much more is held
        st.integers(0, 3).map(lambda n: n == 0),  # its hold is closed before the charge
    ),
    min_size=1,
    max_size=12,
)


def _what_became(team: Account) -> tuple[Decimal, Decimal, Decimal, list[Decimal]]:
    """Posted, held and owed, and what is left of each grant."""
    purse = wallet(team.code)
    owed = sum(
        account_balance(debt) for debt in Account.objects.filter(code=f"customer_receivable:{team.pk}")
    )
    grants = CreditGrant.objects.filter(account=team).order_by("pk")
    return purse.posted, purse.held, Decimal(owed), list(grants.values_list("remaining", flat=True))


@pytest.mark.django_db
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MOVES)
def test_together_they_cost_what_they_cost_one_by_one(moves: Sequence[tuple[int, int, int, bool]]):
    """Draws on grants too. Only of a debt there may be less: one by one, what others hold cannot pay for it."""
    results = []
    for together in (True, False):
        teams = [make_wallet(f"{n * 40}") for n in range(3)]
        for team in teams:
            grant(team, Kind.PROMOTIONAL, "15")
            grant(team, Kind.SLA, "10")
        revenue = platform_account(code="usage_revenue", currency="USD")
        lines, requests, loose = [], [], []
        for place, amount, more, closed in moves:
            team, event = teams[place], uuid.uuid4().hex
            if wallet(team.code).available < amount + more:
                continue  # a gateway would have refused it
            hold_id = hold(team, f"{amount + more}")
            if closed:
                loose.append(team)
                void_hold(hold_id=hold_id)
            lines.append(delivered(team, event, f"{amount}", hold_id))
            legs = spend(team, revenue, f"{amount}")
            requests.append(JournalRequest("test", event, "usage", "USD", legs, "test", capture_hold=hold_id))
        if together:
            charge(*lines)
        else:
            post_journals(requests)
        results.append([_what_became(team) for team in teams])
    for team, netted, singly in zip(teams, *results, strict=True):
        assert netted[0] + netted[2] == singly[0] + singly[2]
        assert netted[1] == singly[1] == 0
        assert netted[2] >= singly[2]
        if team not in loose:
            assert netted == singly
    assert wrong() == []
