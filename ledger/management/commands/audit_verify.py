"""manage.py audit_verify: walks the sealed chains, exit status 1 at the first bad link."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ledger.audit import verify_audit


class Command(BaseCommand):
    help = "Walks the sealed chains over the audit trail. Exit status 1 at the first bad link."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object on standard output")

    def handle(self, *args: Any, **options: Any) -> None:
        report = verify_audit()
        if options["json"]:
            self.stdout.write(json.dumps(asdict(report)))
        elif report.fault is None:
            self.stdout.write(
                f"ok: {report.links} links, {report.heads} exported heads, {report.unsealed} events not sealed yet"
            )
        else:
            fault = report.fault
            self.stdout.write(
                f"FAIL shard {fault.shard}, link {fault.seq}, event {fault.event_id}: {fault.kind}, {fault.detail}"
            )
        if not report.ok:
            sys.exit(1)
