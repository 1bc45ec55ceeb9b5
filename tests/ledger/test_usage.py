"""Usage lines: loaded once, rated once, posted once, and proved complete."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal

import psycopg
import pytest
from django.db import connection
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import errors

from apex.local.postgres import OWNER_ROLE
from ledger import tasks
from ledger.errors import BadPosting
from ledger.models import Account, Journal, UsageLine
from ledger.selectors import account_balance, wallet
from ledger.services import MeteredLine, close_period, load_usage, platform_account, post_usage
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet
from tests.ledger.test_concurrency import at_once, broken
from tests.services import database_url

NOW = datetime.now(UTC)


def line(
    team: Account, event: str, quantity: str = "2", rate: str | None = "0.5", **more: object
) -> MeteredLine:
    return MeteredLine(
        event_id=event,
        account_id=team.pk,
        sku="tokens",
        quantity=Decimal(quantity),
        currency=team.currency,
        occurred_at=more.pop("occurred_at", NOW),
        rate=None if rate is None else Decimal(rate),
        **more,
    )


@pytest.mark.django_db
def test_lines_of_a_tick_become_one_journal_per_wallet():
    rich, other = make_wallet("10"), make_wallet("10")
    lines = [
        line(rich, "a"),
        line(rich, "b", "3"),
        line(other, "c"),
        line(other, "d", "5", None, amount=Decimal(4)),
    ]
    assert load_usage(lines).loaded == 4
    assert post_usage(limit=100) == 4
    assert post_usage(limit=100) == 0
    journals = Journal.objects.filter(idem_scope="usage.tick").order_by("id")
    assert [(journal.meta["lines"], journal.entries.count()) for journal in journals] == [(2, 2), (2, 2)]
    assert (wallet(rich.code).posted, wallet(other.code).posted) == (Decimal("7.5"), 5)
    assert account_balance(platform_account(code="usage_revenue", currency="USD")) == Decimal("7.5")


@pytest.mark.django_db
def test_a_line_is_loaded_once_and_another_under_its_id_is_named():
    team = make_wallet("10")
    first = [line(team, "a"), line(team, "a"), line(team, "b")]
    result = load_usage(first)
    assert (result.loaded, result.known, list(result.conflicting)) == (2, 1, [])
    again = load_usage([line(team, "a"), line(team, "b", "7"), line(team, "c")])
    assert (again.loaded, again.known, list(again.conflicting)) == (1, 1, ["b"])
    post_usage(limit=100)
    assert wallet(team.code).posted == 7


@pytest.mark.django_db
def test_a_correction_is_charged_the_difference_once():
    team = make_wallet("10")
    load_usage([line(team, "a", "4")])
    post_usage(limit=100)
    fixed = load_usage([line(team, "a2", "1", corrects="a"), line(team, "x", "1", corrects="nothing")])
    assert (fixed.loaded, list(fixed.orphans)) == (1, ["x"])
    assert list(load_usage([line(team, "a3", "1", corrects="a")]).conflicting) == ["a3"]
    post_usage(limit=100)
    assert wallet(team.code).posted == Decimal("9.5")
    # And one that corrects the correction, loaded together with a line of its own.
    load_usage([line(team, "a4", "2", corrects="a2"), line(team, "b", "2")])
    post_usage(limit=100)
    assert wallet(team.code).posted == 8


@pytest.mark.django_db
def test_a_late_line_is_booked_in_the_open_period():
    team = make_wallet("10")
    close_period(through=(NOW - timedelta(days=1)).date(), actor="staff")
    load_usage([line(team, "late", occurred_at=NOW - timedelta(days=40))])
    assert post_usage(limit=10) == 1
    [late] = UsageLine.objects.all()
    assert late.journal is not None
    assert late.journal.accounting_date == datetime.now(UTC).date()
    assert late.occurred_at == NOW - timedelta(days=40)


@pytest.mark.django_db
def test_what_a_wallet_cannot_pay_is_its_debt():
    poor, rich = make_wallet("1"), make_wallet("10")
    load_usage([line(poor, "a", "5"), line(rich, "b")])
    post_usage(limit=10)
    debt = Account.objects.get(code=f"customer_receivable:{poor.pk}")
    assert (wallet(poor.code).posted, account_balance(debt), wallet(rich.code).posted) == (
        0,
        Decimal("-1.5"),
        9,
    )
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    assert [result.name for result in verify_books() if not result.ok] == []


def test_lines_of_a_closed_wallet_wait_and_hold_nobody_up(fresh_database):
    gone, team = make_wallet(), make_wallet("10")
    load_usage([line(gone, "a"), line(team, "b")])
    with psycopg.connect(database_url(fresh_database, OWNER_ROLE)) as owner:
        owner.execute("UPDATE ledger_account SET closed_at = now() WHERE id = %s", [gone.pk])
    assert [post_usage(limit=10), post_usage(limit=10)] == [1, 0]
    assert (wallet(team.code).posted, UsageLine.objects.get(event_id="a").journal) == (9, None)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "wrong", [{"quantity": "-1"}, {"rate": None}, {"rate": "-1"}, {"rate": None, "amount": Decimal(-1)}]
)
def test_a_malformed_line_stops_its_load(wrong):
    team = make_wallet("10")
    with pytest.raises(BadPosting, match='usage line "bad"'):
        load_usage([line(team, "good"), line(team, "bad", **wrong)])
    with pytest.raises(BadPosting, match='usage line "foreign"'):
        load_usage([MeteredLine("foreign", team.pk, "x", Decimal(1), "EUR", NOW, Decimal(1))])
    assert not UsageLine.objects.exists()


@pytest.mark.django_db
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**12), st.integers(0, 10**12))
@example(1, 500)  # half of a billionth: to the even one
@example(3, 500)
def test_a_line_is_rated_half_even(quantity, rate):
    event = uuid.uuid4().hex
    team = make_wallet()
    load_usage([line(team, event, str(quantity), f"{Decimal(rate).scaleb(-12):f}")])
    exact = Decimal(quantity) * Decimal(rate).scaleb(-12)
    assert UsageLine.objects.get(event_id=event).charge == exact.quantize(Decimal("1e-9"), ROUND_HALF_EVEN)


def test_many_loaders_and_posters_book_each_line_once(fresh_database):
    teams = [make_wallet("1000") for _ in range(3)]

    def work(number: int) -> int:
        load_usage(
            [line(team, f"{number % 10} {index}") for index in range(20) for team in [teams[index % 3]]]
        )
        return post_usage(limit=15)

    posted = sum(at_once(work, 20)) + tasks.post_usage()
    assert posted == UsageLine.objects.count() == 200
    assert sum(1000 - wallet(team.code).posted for team in teams) == 200
    assert broken() == []


def test_lines_are_final_and_the_application_only_reads_them(fresh_database):
    team = make_wallet("10")
    load_usage([line(team, "a")])
    with psycopg.connect(database_url(fresh_database), autocommit=True) as app:
        for attack in ("INSERT INTO usage_line (event_id) VALUES ('x')", "UPDATE usage_line SET charge = 0"):
            with pytest.raises(errors.InsufficientPrivilege):
                app.execute(attack)
        app.execute("SELECT usage_stage()")
        with pytest.raises(errors.InsufficientPrivilege):
            app.execute("SELECT * FROM pg_temp.usage_line_staging")
    post_usage(limit=10)
    with psycopg.connect(database_url(fresh_database, OWNER_ROLE), autocommit=True) as owner:
        for attack in (
            "UPDATE usage_line SET journal_id = NULL",
            "DELETE FROM usage_line",
            "TRUNCATE usage_line CASCADE",
        ):
            with pytest.raises(errors.RestrictViolation):
                owner.execute(attack)


def test_a_table_of_the_applications_own_is_not_taken_for_the_owners(fresh_database):
    """A trigger on it would run with the owner's rights inside the owner's function."""
    with psycopg.connect(database_url(fresh_database), autocommit=True) as app:
        app.execute("CREATE TEMP TABLE usage_line_staging (event_id text, account_id bigint)")
        for call in ("usage_stage()", "usage_load()", "usage_charge('x')"):
            with pytest.raises(psycopg.Error, match="usage_stage"):
                app.execute(f"SELECT * FROM {call}")
