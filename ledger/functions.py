"""Puts the SQL of ledger/sql into the database. Called by migrations, as the owner of the tables.

A later change of a function edits its file and adds a migration that calls `install_functions` again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from psycopg import sql

SQL = Path(__file__).parent / "sql"
FILES = (
    "accounts.sql",
    "posting.sql",
    "batches.sql",
    "reversals.sql",
    "holds.sql",
    "settlement.sql",
    "guards.sql",
    "periods.sql",
    "grants.sql",
    "totals.sql",
    "usage.sql",
    "usage_corrections.sql",
    "charges.sql",
    "audit.sql",
    "refunds.sql",
    "recoveries.sql",
    "proposals.sql",
)
# Files that speak of a table younger than the first migrations, which install the others.
_NEEDS = {
    "batches.sql": "CreditGrant",
    "grants.sql": "CreditGrant",
    "totals.sql": "AccountTotal",
    "usage.sql": "UsageLine",
    "usage_corrections.sql": "UsageReturn",
    "charges.sql": "UsageLine",
    "audit.sql": "AuditSeal",
    "refunds.sql": "Refund",
    "recoveries.sql": "Refund",
    "proposals.sql": "Proposal",
}

# What the application may call. Everything else in the files is a part of these.
API = (
    "account_open",
    "ledger_post",
    "ledger_post_batch",
    "reverse_journal",
    "exchange_post",
    "credit_grant_create",
    "grant_expire_due",
    "grant_revoke",
    "grant_recognise",
    "period_close",
    "period_reopen",
    "debt_write_off",
    "usage_stage",
    "usage_load",
    "usage_post",
    "usage_charge",
    "totals_horizon",
    "totals_advance",
    "hold_create",
    "hold_capture",
    "hold_void",
    "hold_void_by_key",
    "hold_expire_due",
    "settle_apply",
    "settle_refund",
    "settle_recovery",
    "settle_transfer",
    "audit_seal_events",
)
PARTS = (
    "ledger_readable",
    "ledger_book",
    "ledger_plain_journals",
    "ledger_book_plain",
    "ledger_fx_account",
    "ledger_transfer",
    "ledger_closed_through",
    "usage_rate",
    "usage_staged",
    "usage_charge_check",
    "usage_legs",
    "usage_meta",
    "grant_expired",
    "grant_make",
    "grant_draw",
    "grant_unwind",
    "grant_take",
    "ledger_replay",
    "ledger_release",
    "ledger_receivable_of",
    "ledger_collect_debt",
    "ledger_uuid7",
    "ledger_check_legs",
    "ledger_check_journal",
    "ledger_check_period",
    "ledger_check_close",
    "ledger_refuse_change",
    "audit_stamp",
    "audit_field",
    "audit_hash_v1",
    "ledger_lock_capture",
    "ledger_same_refund",
    "ledger_apply_parked",
    "ledger_gone_back",
    "ledger_way_of",
    "ledger_park",
    "ledger_check_proposal",
)

_SIGNATURES = """
SELECT p.proname, p.oid::regprocedure::text FROM pg_proc p
 WHERE p.pronamespace = 'public'::regnamespace AND p.proname = ANY (%s)
"""


def read(name: str) -> str:
    return (SQL / name).read_text()


def install_functions(apps: Any, schema_editor: Any) -> None:
    """Creates or replaces every function and trigger, and lets the application role call the API only."""
    role = settings.DB_APP_ROLE
    with schema_editor.connection.cursor() as cursor:
        for name in FILES:
            if _table_exists(apps, name):
                cursor.execute(read(name))
        cursor.execute("SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = %s)", [role])
        (role_exists,) = cursor.fetchone()
        cursor.execute(_SIGNATURES, [[*API, *PARTS]])
        for name, signature in cursor.fetchall():
            function = sql.SQL(signature)
            cursor.execute(sql.SQL("REVOKE ALL ON FUNCTION {} FROM PUBLIC").format(function))
            if name in API and role_exists:
                cursor.execute(
                    sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(function, sql.Identifier(role))
                )


def _table_exists(apps: Any, file: str) -> bool:
    """Whether the migrations so far have made what the file needs."""
    try:
        return file not in _NEEDS or bool(apps.get_model("ledger", _NEEDS[file]))
    except LookupError:
        return False


def remove_functions(apps: Any, schema_editor: Any) -> None:
    """Drops them, and with them the triggers that use them."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(_SIGNATURES, [[*API, *PARTS]])
        for _, signature in cursor.fetchall():
            cursor.execute(sql.SQL("DROP FUNCTION {} CASCADE").format(sql.SQL(signature)))
