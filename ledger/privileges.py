"""What the application role may do with the ledger's tables. Everything else goes through functions."""

# Table -> privileges. A table that is not named here is an ordinary one of another room.
TABLE_PRIVILEGES: dict[str, str] = {
    # Written by the SQL functions only.
    "ledger_account": "SELECT",
    "ledger_balance": "SELECT",
    "ledger_journal": "SELECT",
    "ledger_entries": "SELECT",
    "ledger_hold": "SELECT",
    "ledger_account_total": "SELECT",
    "credit_grant": "SELECT",
    "grant_use": "SELECT",
    "usage_line": "SELECT",
    "usage_return": "SELECT",
    "ledger_period_close": "SELECT",
    "settlement": "SELECT",
    "ledger_parked_refund": "SELECT",
    "audit_seal": "SELECT",
    # Appended to directly; rows are final.
    "audit_events": "SELECT, INSERT",
    # Decided once; what was proposed stays as it was.
    "ledger_proposal": "SELECT, INSERT, UPDATE (state, decided_by, decided_at, note, journal_id)",
    "ledger_verification": "SELECT, INSERT",
    # Progress of work with the outside; the bytes that came in stay as they came.
    "ledger_inbound_event": "SELECT, INSERT, UPDATE (verified, attempts, due_at, applied_at, parked_at, error)",
    "ledger_top_up": "SELECT, INSERT, UPDATE (state, order_id, approve_url, failure, changed_at)",
    # django-paypal's log of notifications: nothing of ours reads it.
    "paypal_ipn": "SELECT, INSERT",
    "ledger_refund": "SELECT, INSERT, UPDATE (state, external_id, hold_id, failure, changed_at)",
    "ledger_dispute": "SELECT, INSERT, UPDATE",
    "ledger_reconciliation": "SELECT, INSERT",
    "ledger_difference": "SELECT, INSERT, UPDATE",
    "ledger_payout": "SELECT, INSERT, UPDATE (state, bank_reference, note, changed_at)",
}
