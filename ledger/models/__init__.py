"""Everything the books consist of. Rows are written by the SQL functions of ledger/sql, see docs/ledger.md."""

from ledger.models.accounts import Account, AccountTotal, Balance
from ledger.models.audit import AuditEvent, AuditSeal
from ledger.models.grants import CreditGrant, GrantUse
from ledger.models.holds import Hold
from ledger.models.journals import Entry, Journal, PeriodClose
from ledger.models.payments import InboundEvent, ParkedRefund, Settlement, TopUp
from ledger.models.proofs import Verification

__all__ = [
    "Account",
    "AccountTotal",
    "AuditEvent",
    "AuditSeal",
    "Balance",
    "CreditGrant",
    "Entry",
    "GrantUse",
    "Hold",
    "InboundEvent",
    "Journal",
    "ParkedRefund",
    "PeriodClose",
    "Settlement",
    "TopUp",
    "Verification",
]
