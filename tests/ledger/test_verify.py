"""Each check is broken on purpose, by a superuser with the triggers off, and has to be named."""

from __future__ import annotations

import json
from io import StringIO

import psycopg
import pytest
from django.core.management import call_command

from apex.local.postgres import SUPERUSER
from ledger import verify
from ledger.verify import register_check, verify_books
from tests.services import database_url

# Every check by name, and one way to break what it watches. {w}: a wallet, {r}: usage_revenue.
BREAKS = {
    "currencies_sum_to_zero": "UPDATE ledger_entries SET amount = amount + 1 WHERE id = (SELECT min(id) FROM ledger_entries)",
    "journals_sum_to_zero": """
        WITH two AS (SELECT min(id) AS a, max(id) AS b FROM ledger_entries)
        UPDATE ledger_entries e SET amount = amount + CASE WHEN e.id = two.a THEN 1 ELSE -1 END
          FROM two WHERE e.id IN (two.a, two.b)""",
    "journals_have_legs": "DELETE FROM ledger_entries WHERE journal_id = (SELECT min(id) FROM ledger_journal)",
    "entries_have_one_currency": "UPDATE ledger_entries SET amount_currency = 'EUR' WHERE id = (SELECT min(id) FROM ledger_entries)",
    "balances_equal_entries": "UPDATE ledger_balance SET posted = posted + 1 WHERE account_id = {w}",
    "held_equals_open_holds": "UPDATE ledger_hold SET state = 'voided', closed_at = now() WHERE state = 'open'",
    "balances_above_floor": "UPDATE ledger_balance SET held = posted + 1 WHERE account_id = {w}",
    "wallets_have_balances": "DELETE FROM ledger_balance WHERE account_id = {w}",
    "captured_holds_were_taken": "UPDATE ledger_hold SET captured = amount WHERE state = 'captured'",
    "reversals_undo": "UPDATE ledger_entries SET account_id = {w} WHERE account_id = {r} AND journal_id = (SELECT max(reverses_id) FROM ledger_journal)",
    "closed_periods_stay": "INSERT INTO ledger_period_close (closed_through, closed_by, note, created_at) VALUES (current_date + 1, 'evil', '', '2001-01-01')",
    "settlements_are_booked": "UPDATE settlement SET gross = gross + 1, net = net + 1",
    "refunds_fit_their_captures": "UPDATE settlement SET fee = 2, net = -1 WHERE kind = 'refund'",
    "refunds_do_not_stay_parked": "INSERT INTO ledger_parked_refund (provider, external_id, capture_id, currency, gross, fee, actor, error) VALUES ('paypal', 'X', 'C', 'USD', 1, 0, 'evil', '')",
    "captures_have_settlements": "DELETE FROM settlement",
    "top_ups_are_settled": "UPDATE ledger_top_up SET state = 'pending'",
    "debts_are_not_overpaid": "UPDATE ledger_entries SET amount = -amount WHERE account_id = (SELECT id FROM ledger_account WHERE code LIKE 'customer_rec%')",
    "running_balances_add_up": "UPDATE ledger_entries SET balance = balance + 1 WHERE account_id = {w}",
    "account_totals_equal_entries": "UPDATE ledger_account_total SET posted = posted + 1",
    "exchanges_are_pairs": "UPDATE ledger_journal SET group_id = gen_random_uuid() WHERE group_id IS NOT NULL",
    "grants_remain_what_was_not_used": "UPDATE credit_grant SET remaining = remaining - 1",
    "grants_are_part_of_their_wallet": "UPDATE ledger_balance SET granted = granted + 0.5 WHERE granted > 0",
    "grants_are_booked": "UPDATE credit_grant SET amount = amount + 1",
    "draws_are_within_their_journals": "UPDATE grant_use SET amount = amount * 10 WHERE id = (SELECT min(id) FROM grant_use)",
    "nothing_is_drawn_after_its_expiry": "UPDATE credit_grant SET expires_at = '2001-01-01'",
    "reversals_unwind_their_draws": "DELETE FROM grant_use WHERE amount < 0",
    "usage_equals_its_journals": "DELETE FROM usage_line WHERE id = (SELECT min(id) FROM usage_line)",
    "usage_is_rated_once": "UPDATE usage_line SET charge = charge + 1",
    "usage_does_not_wait": "UPDATE usage_line SET journal_id = NULL, received_at = now() - interval '2 hours'",
    "corrections_give_back_what_was_charged": "UPDATE usage_return SET amount = amount + 1",
    "promotions_are_recognised_once": "UPDATE credit_grant SET recognised = recognised + 1",
}  # fmt: skip


def failed() -> set[str]:
    return {result.name for result in verify_books() if not result.ok}


def test_good_books_pass_and_the_command_says_so(books):
    out = StringIO()
    call_command("ledger_verify", "--json", stdout=out)
    answer = json.loads(out.getvalue())
    assert answer["ok"]
    assert {check["name"] for check in answer["checks"]} >= set(BREAKS)
    assert all(check == {"name": check["name"], "ok": True, "rows": []} for check in answer["checks"])


def test_every_check_has_a_way_to_break_it():
    assert set(BREAKS) == verify.LEDGER_CHECKS


@pytest.mark.parametrize("name", BREAKS)
def test_broken_books_are_found_out(books, fresh_database, name):
    with psycopg.connect(database_url(fresh_database, SUPERUSER)) as evil:
        for table in (
            "ledger_entries",
            "ledger_journal",
            "settlement",
            "ledger_period_close",
            "credit_grant",
            "grant_use",
            "usage_line",
            "usage_return",
        ):
            evil.execute(f"ALTER TABLE {table} DISABLE TRIGGER ALL")
        for constraint in ("balance_above_floor", "balance_granted_within"):
            evil.execute(f"ALTER TABLE ledger_balance DROP CONSTRAINT {constraint}")
        evil.execute("SET session_replication_role = replica")
        assert evil.execute(BREAKS[name].format(**books)).rowcount > 0
    assert name in failed()
    out = StringIO()
    with pytest.raises(SystemExit) as caught:
        call_command("ledger_verify", "--json", stdout=out)
    assert caught.value.code == 1
    [check] = [check for check in json.loads(out.getvalue())["checks"] if check["name"] == name]
    assert not check["ok"]
    assert check["rows"]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE usage_line SET journal_id = NULL",  # a journal without its lines
        "DELETE FROM ledger_entries e USING usage_line l WHERE l.journal_id = e.journal_id",  # lines without it
        "UPDATE usage_line SET journal_id = journal_id + 1000",
        "UPDATE usage_line SET charge = charge + 0.000000001",  # a wrong sum
        "UPDATE usage_line SET account_id = account_id + 1",  # a stranger's
    ],
)
def test_usage_and_its_journals_are_compared_both_ways(books, fresh_database, damage):
    with psycopg.connect(database_url(fresh_database, SUPERUSER)) as evil:
        evil.execute("SET session_replication_role = replica")
        for table in ("usage_line", "ledger_entries"):
            evil.execute(f"ALTER TABLE {table} DISABLE TRIGGER ALL")
        assert evil.execute(damage).rowcount > 0
    assert "usage_equals_its_journals" in failed()


@pytest.mark.django_db
def test_other_rooms_add_checks(monkeypatch):
    monkeypatch.setattr(verify, "_CHECKS", dict(verify._CHECKS))
    register_check("no_tuesdays", "SELECT 1 AS tuesday")
    register_check("no_tuesdays", "SELECT 1 AS tuesday")
    [result] = [result for result in verify_books() if not result.ok]
    assert (result.name, result.rows) == ("no_tuesdays", [{"tuesday": 1}])
    with pytest.raises(ValueError, match="another check"):
        register_check("no_tuesdays", "SELECT 2")
