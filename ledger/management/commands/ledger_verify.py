"""manage.py ledger_verify: proves the books, exit status 1 when they are wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.core.serializers.json import DjangoJSONEncoder

from ledger.proof import prove_books


class Command(BaseCommand):
    help = "Checks every invariant of the books. Exit status 1 when one fails."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object on standard output")

    def handle(self, *args: Any, **options: Any) -> None:
        results = prove_books()
        ok = all(result.ok for result in results)
        if options["json"]:
            answer = {"ok": ok, "checks": [asdict(result) for result in results]}
            self.stdout.write(json.dumps(answer, cls=DjangoJSONEncoder))
        else:
            for result in results:
                self.stdout.write(f"{'ok  ' if result.ok else 'FAIL'} {result.name}")
                for row in result.rows:
                    self.stdout.write("     " + ", ".join(f"{name}={value}" for name, value in row.items()))
        if not ok:
            sys.exit(1)
