"""The audit trail as evidence: sealed in chains, heads carried out of the database, chains walked again."""

from ledger.audit.chain import AuditReport, Fault, verify_audit
from ledger.audit.heads import Head, export_heads
from ledger.audit.sealing import seal_events

__all__ = ["AuditReport", "Fault", "Head", "export_heads", "seal_events", "verify_audit"]
