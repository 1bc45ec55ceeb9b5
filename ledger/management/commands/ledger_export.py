"""manage.py ledger_export --hledger: the books for another program to check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ledger.export import hledger_journal


class Command(BaseCommand):
    help = "Writes every journal with balance assertions. Check with: hledger check -s -f FILE"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--hledger", action="store_true", required=True, help="as an hledger journal")
        parser.add_argument("--output", type=Path, help="a file; standard output without it")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["output"] is None:
            for line in hledger_journal():
                self.stdout.write(line, ending="")
            return
        with options["output"].open("w") as file:
            file.writelines(hledger_journal())
