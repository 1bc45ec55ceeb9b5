"""Hostile SQL: as the application, as the owner of the tables, and with ordinary triggers asleep."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from djmoney.money import Money
from psycopg import errors

from apex.local.postgres import APP_ROLE, OWNER_ROLE, SUPERUSER
from ledger.functions import API, PARTS
from ledger.models import Account, CreditGrant
from ledger.services import grant_credit, platform_account, post_journal, revoke_grant
from tests.ledger.conftest import make_wallet, spend
from tests.services import database_url

TABLES = (
    "ledger_journal",
    "ledger_entries",
    "grant_use",
    "settlement",
    "audit_events",
    "audit_seal",
    "ledger_period_close",
)
# A column of the tables that have no id.
COLUMNS = {"ledger_balance": "account_id", "audit_seal": "seq"}
JOURNAL = """
INSERT INTO ledger_journal (public_id, kind, currency, idem_scope, idem_key, request_hash, effective_at, actor, meta)
VALUES (gen_random_uuid(), 'evil', 'USD', 'evil', gen_random_uuid()::text, '', now(), 'evil', '{}') RETURNING id
"""


class Books:
    """A database with one wallet of 10 USD and one journal of the past."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wallet = make_wallet("10").pk
        self.revenue = platform_account(code="usage_revenue", currency="USD").pk
        self.euro = platform_account(code="bank", currency="EUR").pk

    def connect(self, role: str) -> psycopg.Connection:
        return psycopg.connect(database_url(self.name, role))


@pytest.fixture
def books(fresh_database) -> Books:
    return Books(fresh_database)


@pytest.fixture
def owner(books) -> Iterator[psycopg.Connection]:
    with books.connect(OWNER_ROLE) as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def replica(books) -> Iterator[psycopg.Connection]:
    """The superuser in the state in which ordinary triggers and foreign keys do not fire."""
    with books.connect(SUPERUSER) as connection:
        connection.execute("SET session_replication_role = replica")
        yield connection
        connection.rollback()


def add_legs(connection: psycopg.Connection, journal: int, *legs: tuple[int, str, str]) -> None:
    rows = ", ".join(f"({journal}, {account}, {amount}, '{currency}')" for account, amount, currency in legs)
    connection.execute(
        f"INSERT INTO ledger_entries (journal_id, account_id, amount, amount_currency) VALUES {rows}"
    )


def new_journal(connection: psycopg.Connection) -> int:
    return connection.execute(JOURNAL).fetchone()[0]


def test_the_application_can_only_append(books):
    fill_every_table(books)
    with books.connect(APP_ROLE) as app:
        app.autocommit = True
        for table in (
            *TABLES,
            "ledger_account",
            "ledger_balance",
            "ledger_hold",
            "ledger_parked_refund",
            "credit_grant",
            "usage_return",
        ):
            column = COLUMNS.get(table, "id")
            for attack in (
                f"UPDATE {table} SET {column} = {column}",
                f"DELETE FROM {table}",
                f"TRUNCATE {table} CASCADE",
            ):
                with pytest.raises(errors.InsufficientPrivilege):
                    app.execute(attack)
        for attack in (
            JOURNAL,
            f"INSERT INTO ledger_entries (journal_id, account_id, amount, amount_currency) VALUES (1, {books.wallet}, 1, 'USD')",
            f"INSERT INTO ledger_balance (account_id, posted, held, version) VALUES ({books.euro}, 1000, 0, 0)",
            "SELECT ledger_book('s', 'k', 'k', 'USD', '[]', 'a', '{}', NULL, NULL, true, NULL)",
            "SELECT ledger_release('{1}', 'voided')",
            f"SELECT grant_draw({books.wallet}, 1, 1, now(), NULL)",
            "INSERT INTO ledger_period_close (closed_through, closed_by, note) VALUES ('2001-01-01', 'a', '')",
            "SET session_replication_role = replica",
            "ALTER TABLE ledger_entries DISABLE TRIGGER ALL",
            "DROP FUNCTION ledger_check_legs CASCADE",
            "UPDATE ledger_inbound_event SET raw = ''",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                app.execute(attack)


def fill_every_table(books: Books) -> None:
    with books.connect(OWNER_ROLE) as connection:
        connection.execute(
            "INSERT INTO audit_events (shard, actor, action, object_type, object_id, request_id) VALUES (0, 'a', 'b', 'c', 'd', '')"
        )
        connection.commit()
        connection.execute("SELECT audit_seal_events(0, 1)")
        connection.execute(
            "INSERT INTO ledger_period_close (closed_through, closed_by, note) VALUES ('2001-01-01', 'a', '')"
        )
        connection.execute(
            "INSERT INTO ledger_inbound_event (channel, dedup_key, raw, headers, error) VALUES ('c', 'k', 'r', '{}', '')"
        )
        post = (
            "SELECT settle_apply('paypal', 'capture', 'C1', 'O1', NULL, %s, %s, %s, 'USD', 5, 1, 'a', now())"
        )
        connection.execute(post, [books.wallet, books.revenue, books.revenue])
    granted = grant_credit(
        account=Account.objects.get(pk=books.wallet), kind=CreditGrant.Kind.PROMOTIONAL, amount=Money(1, "USD"),
        key="g", actor="test",
    )  # fmt: skip
    assert revoke_grant(grant_id=granted.grant_id, reason="test", actor="test") == 1


@pytest.mark.parametrize("role", ["owner", "replica"])
@pytest.mark.parametrize("table", TABLES)
def test_rows_are_final_even_for_the_owner(books, table, role, request):
    fill_every_table(books)
    connection = request.getfixturevalue(role)
    column = COLUMNS.get(table, "id")
    for attack in (
        f"UPDATE {table} SET {column} = {column}",
        f"DELETE FROM {table}",
        f"TRUNCATE {table} CASCADE",
    ):
        with pytest.raises(errors.RestrictViolation, match="rows are final"), connection.transaction():
            connection.execute(attack)


@pytest.mark.parametrize("role", ["owner", "replica"])
def test_unbalanced_legs_are_refused(books, role, request):
    connection = request.getfixturevalue(role)
    journal = new_journal(connection)
    with pytest.raises(psycopg.Error, match="not to zero") as caught:
        add_legs(connection, journal, (books.wallet, "1", "USD"), (books.revenue, "-2", "USD"))
    assert caught.value.sqlstate == "AX006"


@pytest.mark.parametrize("role", ["owner", "replica"])
def test_a_journal_needs_two_legs_at_commit(books, role, request):
    connection = request.getfixturevalue(role)
    new_journal(connection)
    with pytest.raises(psycopg.Error, match="fewer than two legs"):
        connection.commit()


@pytest.mark.parametrize("role", ["owner", "replica"])
def test_legs_do_not_come_late_even_when_they_balance(books, role, request):
    connection = request.getfixturevalue(role)
    (old,) = connection.execute("SELECT min(id) FROM ledger_journal").fetchone()
    with pytest.raises(psycopg.Error, match="legs come in the transaction that wrote it"):
        add_legs(connection, old, (books.wallet, "1", "USD"), (books.revenue, "-1", "USD"))


@pytest.mark.parametrize("role", ["owner", "replica"])
def test_legs_in_a_foreign_currency_are_refused(books, role, request):
    connection = request.getfixturevalue(role)
    journal = new_journal(connection)
    with pytest.raises(errors.ForeignKeyViolation, match="that has another currency") as caught:
        add_legs(connection, journal, (books.euro, "1", "USD"), (books.wallet, "-1", "USD"))
    assert caught.value.diag.constraint_name == "entry_account_currency"
    connection.rollback()
    if role == "replica":
        connection.execute("SET session_replication_role = replica")
    journal = new_journal(connection)
    with pytest.raises(errors.ForeignKeyViolation, match="which is not its currency") as caught:
        add_legs(connection, journal, (books.euro, "1", "EUR"), (books.euro, "-1", "EUR"))
    assert caught.value.diag.constraint_name == "entry_journal_currency"
    connection.rollback()
    if role == "replica":
        connection.execute("SET session_replication_role = replica")
    journal = new_journal(connection)
    with pytest.raises(errors.ForeignKeyViolation, match="or does not exist"):
        add_legs(connection, journal, (999999, "1", "USD"), (books.wallet, "-1", "USD"))


@pytest.mark.parametrize("role", ["owner", "replica"])
def test_an_account_keeps_its_currency_and_stays(books, role, request):
    connection = request.getfixturevalue(role)
    for attack in (
        "UPDATE ledger_account SET currency = 'EUR'",
        "UPDATE ledger_account SET hot = NOT hot",
        "DELETE FROM ledger_account",
        "TRUNCATE ledger_account CASCADE",
    ):
        with pytest.raises(errors.RestrictViolation, match="rows are final"), connection.transaction():
            connection.execute(attack)


def test_an_old_snapshot_is_no_way_into_a_closed_period(books, owner):
    owner.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    with pytest.raises(psycopg.Error, match="READ COMMITTED transactions only"):
        new_journal(owner)


def test_currencies_do_not_cancel_each_other_out(books, replica):
    journal = new_journal(replica)
    with pytest.raises(psycopg.Error, match="not to zero"):
        add_legs(replica, journal, (books.euro, "1", "EUR"), (books.wallet, "-1", "USD"))


def test_a_balance_does_not_fall_below_its_floor_whatever_updates_it(books, owner):
    with pytest.raises(errors.CheckViolation, match="balance_above_floor"):
        owner.execute("UPDATE ledger_balance SET posted = -1")
    owner.rollback()
    with pytest.raises(errors.CheckViolation, match="balance_above_floor"):
        owner.execute("UPDATE ledger_balance SET held = 11")


def test_every_guard_is_there_and_always_on(books, owner):
    rows = owner.execute(
        "SELECT tgrelid::regclass::text, tgname, tgenabled FROM pg_trigger WHERE NOT tgisinternal AND tgname LIKE 'ledger%'"
    ).fetchall()
    expected = {(table, name) for table in TABLES for name in ("ledger_rows_final", "ledger_table_final")} | {
        ("ledger_account", "ledger_account_final"),
        ("ledger_account", "ledger_table_final"),
        ("credit_grant", "ledger_terms_final"),
        ("usage_line", "ledger_terms_final"),
        ("usage_line", "ledger_rows_final"),
        ("usage_line", "ledger_table_final"),
        ("usage_return", "ledger_rows_final"),
        ("usage_return", "ledger_table_final"),
        ("credit_grant", "ledger_rows_final"),
        ("credit_grant", "ledger_table_final"),
        ("ledger_entries", "ledger_legs_sum_to_zero"),
        ("ledger_journal", "ledger_journal_has_legs"),
        ("ledger_journal", "ledger_journal_in_open_period"),
        ("ledger_period_close", "ledger_close_is_over"),
        ("ledger_proposal", "ledger_proposal_decided_once"),
        ("ledger_proposal", "ledger_rows_final"),
        ("ledger_proposal", "ledger_table_final"),
    }
    assert {(table, name) for table, name, _ in rows} == expected
    assert {enabled for _, _, enabled in rows} == {"A"}


def test_functions_are_for_the_application_only_and_have_a_fixed_search_path(books, owner):
    rows = owner.execute(
        """SELECT proname, prosecdef, coalesce(proconfig::text, ''), has_function_privilege('public', oid, 'EXECUTE'),
                  has_function_privilege(%s, oid, 'EXECUTE')
             FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proname = ANY (%s)""",
        [APP_ROLE, [*API, *PARTS]],
    ).fetchall()
    assert {row[0] for row in rows} == {*API, *PARTS}
    for name, security_definer, config, for_all, for_app in rows:
        assert not for_all
        assert for_app == (name in API)
        assert security_definer == (name in API)
        assert "search_path=public, pg_temp" in config or name not in API


def test_a_temporary_table_does_not_stand_in_for_the_books(books):
    with books.connect(APP_ROLE) as app:
        app.execute("CREATE TEMPORARY TABLE ledger_balance AS SELECT * FROM public.ledger_balance")
        app.execute("UPDATE pg_temp.ledger_balance SET posted = 1000000")
        with pytest.raises(psycopg.Error, match=r"has 10\.0+ available") as caught:
            app.execute("SELECT hold_create(%s, 11, 'USD', 'k', '1 minute', 'me')", [books.wallet])
        assert caught.value.sqlstate == "AX001"


def test_the_functions_can_be_removed_and_installed_again(fresh_database):
    from django.core.management import call_command
    from django.db import connections

    from tests import services

    services._use_database(fresh_database, OWNER_ROLE)
    for target in ("0001", "0002", "zero", "0002", "0003", "0002", "0005", "0004"):
        call_command("migrate", "ledger", target, verbosity=0)
    call_command("migrate", "ledger", verbosity=0)
    services._use_database(fresh_database)
    wallet = make_wallet("10")
    revenue = platform_account(code="usage_revenue", currency="USD")
    post_journal(
        scope="s", key="k", kind="usage", currency="USD", lines=spend(wallet, revenue, "1"), actor="test"
    )
    connections.close_all()


@pytest.mark.parametrize("role", ["owner", "replica"])
def test_a_single_leg_is_refused(books, role, request):
    connection = request.getfixturevalue(role)
    journal = new_journal(connection)
    with pytest.raises(psycopg.Error, match="not to zero"):
        add_legs(connection, journal, (books.wallet, "1", "USD"))
