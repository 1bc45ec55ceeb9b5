"""Everything the books consist of. Rows are written by the SQL functions of ledger/sql, see docs/ledger.md."""

from ledger.models.accounts import Account, AccountTotal, Balance
from ledger.models.audit import AuditEvent, AuditSeal
from ledger.models.grants import CreditGrant, GrantUse
from ledger.models.holds import Hold
from ledger.models.journals import Entry, Journal, PeriodClose
from ledger.models.payments import InboundEvent, ParkedRefund, Settlement, TopUp
from ledger.models.payouts import Payout
from ledger.models.proofs import Verification
from ledger.models.proposals import Proposal
from ledger.models.reconciliation import Difference, Reconciliation
from ledger.models.returns import Dispute, Refund
from ledger.models.usage import UsageLine, UsageReturn

__all__ = [
    "Account",
    "AccountTotal",
    "AuditEvent",
    "AuditSeal",
    "Balance",
    "CreditGrant",
    "Difference",
    "Dispute",
    "Entry",
    "GrantUse",
    "Hold",
    "InboundEvent",
    "Journal",
    "ParkedRefund",
    "Payout",
    "PeriodClose",
    "Proposal",
    "Reconciliation",
    "Refund",
    "Settlement",
    "TopUp",
    "UsageLine",
    "UsageReturn",
    "Verification",
]
