"""The back office of the ledger: the books to be read, corrections by proposal, queues, proofs."""

from ledger.admin import accounts, books, exceptions, payments, payouts, proofs, proposals

__all__ = ["accounts", "books", "exceptions", "payments", "payouts", "proofs", "proposals"]
