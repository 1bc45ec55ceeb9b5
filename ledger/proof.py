"""The whole proof of the books, and its result as a row."""

from __future__ import annotations

import logging
from dataclasses import asdict

from django.utils import timezone

from ledger.audit import verify_audit
from ledger.models import Verification
from ledger.rebuild import rebuild_and_compare
from ledger.verify import Result, verify_books

logger = logging.getLogger("ledger.proof")


def prove_books() -> list[Result]:
    """Every invariant, and the balances made again from the entries."""
    return [*verify_books(), rebuild_and_compare()]


def prove_audit_trail() -> Result:
    """`audit_verify` as a check: its row is the first bad link."""
    report = verify_audit()
    return Result("audit_trail", report.ok, [asdict(report.fault)] if report.fault else [])


def store_proof() -> Verification:
    """Proves books and audit trail and stores the result. What is wrong is logged as an error too; nothing is put right."""
    started_at = timezone.now()
    results = [*prove_books(), prove_audit_trail()]
    for result in results:
        if not result.ok:
            logger.error("the books are wrong: %s, first row %s", result.name, result.rows[0])
    return Verification.objects.create(
        started_at=started_at,
        finished_at=timezone.now(),
        ok=all(result.ok for result in results),
        checks=[asdict(result) for result in results],
    )
