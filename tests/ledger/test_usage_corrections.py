"""Corrections of usage: what comes back, comes back to where it was drawn, the last draw first."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal

import psycopg
import pytest
from django.utils import timezone
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import errors

from apex.local.postgres import OWNER_ROLE
from ledger.errors import BadPosting
from ledger.models import Account, CreditGrant, Journal, UsageLine, UsageReturn
from ledger.selectors import wallet
from ledger.services import close_period, load_usage, post_usage, recognise_promotions, reverse_journal
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet
from tests.ledger.test_charges import charge, delivered, held_before_the_end_of_a_grant, hold
from tests.ledger.test_concurrency import at_once
from tests.ledger.test_grants import grant, left
from tests.ledger.test_usage import line
from tests.services import database_url

Kind = CreditGrant.Kind


def wrong() -> list[str]:
    return [result.name for result in verify_books() if not result.ok]


def correct(team: Account, event: str, corrects: str, quantity: str) -> None:
    assert load_usage([line(team, event, quantity, "1", corrects=corrects)]).loaded == 1
    assert post_usage(limit=10) == 1


@pytest.mark.django_db
def test_the_last_draw_comes_back_first():
    team = make_wallet("5")
    promised, amends = grant(team, Kind.PROMOTIONAL, "2"), grant(team, Kind.SLA, "3")
    load_usage([line(team, "a", "6", "1")])
    post_usage(limit=10)
    assert (left(promised, amends), wallet(team.code).posted) == ([0, 0], 4)
    correct(team, "a2", "a", "5.5")  # half of what credit without terms had paid
    assert (left(promised, amends), wallet(team.code).posted) == ([0, 0], Decimal("4.5"))
    correct(team, "a3", "a2", "4")  # the other half, and one of the amends
    assert (left(promised, amends), wallet(team.code).posted) == ([0, 1], 6)
    correct(team, "a4", "a3", "0")
    assert (left(promised, amends), wallet(team.code).posted) == ([2, 3], 10)
    kinds = Journal.objects.filter(idem_scope="usage.tick").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["usage"] + 3 * ["usage_correction"]
    assert wrong() == []


@pytest.mark.django_db
def test_a_charged_answer_gives_back_to_its_grant_and_the_promise_is_no_expense_any_more():
    team = make_wallet("5")
    promised = grant(team, Kind.PROMOTIONAL, "4")
    charge(delivered(team, "a", "3", hold(team, "3")), delivered(team, "b", "0.5", hold(team, "1")))
    recognise_promotions(limit=10)
    correct(team, "a2", "a", "1")
    assert (left(promised), wallet(team.code).posted) == ([Decimal("2.5")], Decimal("7.5"))
    recognise_promotions(limit=10)
    assert CreditGrant.objects.get(pk=promised).recognised == Decimal("1.5")
    assert wrong() == []


@pytest.mark.django_db
def test_a_correction_upwards_gives_back_its_own_draw_before_the_earlier_one():
    team = make_wallet("5")
    first = grant(team, Kind.PROMOTIONAL, "2")
    load_usage([line(team, "a", "2", "1")])
    post_usage(limit=10)
    second = grant(team, Kind.PROMOTIONAL, "2")
    correct(team, "a2", "a", "3")
    assert left(first, second) == [0, 1]
    correct(team, "a3", "a2", "1")
    assert left(first, second) == [1, 2]
    assert list(UsageReturn.objects.order_by("id").values_list("line__event_id", "amount")) == [
        ("a2", 1),
        ("a", 1),
    ]
    assert wrong() == []


@pytest.mark.django_db
def test_a_line_and_its_correction_may_be_due_together():
    team, other = make_wallet("5"), make_wallet("5")
    promised = grant(team, Kind.PROMOTIONAL, "4")
    load_usage([line(team, "a", "3", "1"), line(team, "b", "1", "1"), line(other, "c", "1", "1")])
    load_usage([line(team, "a2", "1", "1", corrects="a"), line(team, "b2", "2", "1", corrects="b")])
    assert post_usage(limit=10) == 5
    assert (left(promised), wallet(team.code).posted, wallet(other.code).posted) == ([1], 6, 4)
    assert wrong() == []


@pytest.mark.django_db
def test_what_comes_back_to_a_grant_that_is_over_ends_with_it():
    team, promised, taken = held_before_the_end_of_a_grant()
    charge(delivered(team, "a", "2", taken))
    correct(team, "a2", "a", "0.5")
    assert (left(promised), wallet(team.code).available) == ([Decimal("4.5")], 10)
    assert wrong() == []


@pytest.mark.django_db
def test_it_is_booked_in_the_open_period_and_told_with_its_answers():
    team = make_wallet("5")
    load_usage([line(team, "a", "3", "1")])
    post_usage(limit=10)
    close_period(through=timezone.now().date() - timedelta(days=1), actor="staff")
    correct(team, "a2", "a", "1")
    [journal] = Journal.objects.filter(kind="usage_correction")
    assert (journal.accounting_date, journal.meta["lines"]) == (timezone.now().date(), 1)


@pytest.mark.django_db
def test_corrected_usage_is_corrected_again_and_not_reversed():
    team = make_wallet("5")
    load_usage([line(team, "a", "3", "1"), line(team, "b", "1", "1")])
    post_usage(limit=10)
    correct(team, "a2", "a", "1")
    for journal in Journal.objects.filter(idem_scope="usage.tick"):
        with pytest.raises(BadPosting, match="correct them again"):
            reverse_journal(journal_id=journal.pk, reason="test", actor="staff")
    assert wallet(team.code).posted == 3


@pytest.mark.django_db
def test_usage_that_was_taken_back_has_nothing_left_to_correct():
    team = make_wallet("5")
    load_usage([line(team, "a", "3", "1")])
    post_usage(limit=10)
    reverse_journal(journal_id=Journal.objects.latest("id").pk, reason="test", actor="staff")
    assert list(load_usage([line(team, "a2", "1", "1", corrects="a")]).orphans) == ["a2"]
    assert wallet(team.code).posted == 5


def test_what_was_given_back_is_final(fresh_database):
    team = make_wallet("5")
    load_usage([line(team, "a", "3", "1")])
    post_usage(limit=10)
    correct(team, "a2", "a", "1")
    with psycopg.connect(database_url(fresh_database, OWNER_ROLE), autocommit=True) as owner:
        for attack in (
            "UPDATE usage_return SET amount = 1",
            "DELETE FROM usage_return",
            "TRUNCATE usage_return",
        ):
            with pytest.raises(errors.RestrictViolation):
                owner.execute(attack)


def test_many_posters_give_back_once(fresh_database):
    team = make_wallet("100")
    promised = grant(team, Kind.PROMOTIONAL, "40")

    def work(number: int) -> None:
        load_usage([line(team, f"{number}", "4", "1")])
        post_usage(limit=3)
        load_usage([line(team, f"{number}.2", "1", "1", corrects=f"{number}")])
        post_usage(limit=3)

    at_once(work, 16)
    while post_usage(limit=5):
        pass
    assert UsageLine.objects.filter(journal__isnull=True).count() == 0
    # 16 of them cost 1 each in the end. Who came first decides what that was paid with, but not how much it is.
    assert wallet(team.code).posted == 140 - 16
    assert 24 <= left(promised)[0] <= 40
    assert wrong() == []


@pytest.mark.django_db
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 12), min_size=2, max_size=6), st.integers(0, 6), st.integers(0, 6))
@example([10, 4, 8, 0], 3, 4)
def test_a_wallet_stands_as_if_it_had_been_charged_right_at_once(
    amounts: Sequence[int], promised: int, amends: int
):
    stands = []
    for history in (amounts, amounts[-1:]):
        team, event = make_wallet("20"), uuid.uuid4().hex
        for kind, amount in ((Kind.PROMOTIONAL, promised), (Kind.SLA, amends)):
            if amount:
                grant(team, kind, f"{amount}")
        for step, amount in enumerate(history):
            before = f"{event}.{step - 1}" if step else None
            load_usage([line(team, f"{event}.{step}", f"{amount}", "1", corrects=before)])
            post_usage(limit=10)
        grants = CreditGrant.objects.filter(account=team).order_by("pk")
        stands.append((wallet(team.code).posted, list(grants.values_list("remaining", flat=True))))
    assert stands[0] == stands[1]
    assert wrong() == []
