"""Every write to the books. Thin: the work is done by the SQL functions, in one round trip each.

Inside a transaction each call is a savepoint, so a refusal (ledger.errors) leaves it usable.
"""

from ledger.services.accounts import open_wallet, platform_account
from ledger.services.corrections import adjust, close_period, reopen_period, reverse, write_off
from ledger.services.grants import (
    GrantedCredit,
    expire_due_grants,
    grant_credit,
    recognise_promotions,
    revoke_grant,
)
from ledger.services.holds import PlacedHold, capture_hold, create_hold, expire_due_holds, void_hold
from ledger.services.journals import (
    Exchange,
    JournalRequest,
    Line,
    PostedJournal,
    exchange,
    post_journal,
    post_journals,
    reverse_journal,
)
from ledger.services.settlements import SettledRefund, settle_recovery, settle_refund, settle_transfer
from ledger.services.totals import advance_totals
from ledger.services.trail import record_audit_event
from ledger.services.usage import (
    DeliveredLine,
    LoadedUsage,
    MeteredLine,
    charge_lines,
    load_usage,
    post_usage,
)

__all__ = [
    "DeliveredLine",
    "Exchange",
    "GrantedCredit",
    "JournalRequest",
    "Line",
    "LoadedUsage",
    "MeteredLine",
    "PlacedHold",
    "PostedJournal",
    "SettledRefund",
    "adjust",
    "advance_totals",
    "capture_hold",
    "charge_lines",
    "close_period",
    "create_hold",
    "exchange",
    "expire_due_grants",
    "expire_due_holds",
    "grant_credit",
    "load_usage",
    "open_wallet",
    "platform_account",
    "post_journal",
    "post_journals",
    "post_usage",
    "recognise_promotions",
    "record_audit_event",
    "reopen_period",
    "reverse",
    "reverse_journal",
    "revoke_grant",
    "settle_recovery",
    "settle_refund",
    "settle_transfer",
    "void_hold",
    "write_off",
]
