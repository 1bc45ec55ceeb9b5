"""manage.py ledger_bench: postings per second on the running server, in a database that is thrown away."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ledger.bench import PHASES, Bench, throw_away_database


class Command(BaseCommand):
    help = "Measures postings with real client processes. Leaves the books alone: it makes a database of its own."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
        parser.add_argument("--seconds", type=float, default=5.0, help="per load (default 5)")
        parser.add_argument("--clients", type=int, default=8, help="processes at once (default 8)")

    def handle(self, *args: Any, **options: Any) -> None:
        seconds, clients = options["seconds"], options["clients"]
        if seconds <= 0 or not 1 <= clients <= 64:
            raise CommandError("--seconds must be above 0 and --clients 1 to 64")
        with throw_away_database() as url, Bench(url, clients) as bench:
            figures = {phase: bench.run(phase, seconds) for phase in PHASES}
            bench.check()
        usage = figures.pop("usage")
        answer: dict[str, Any] = {
            name: {"tps": figure.per_s, "p99_ms": figure.p99_ms} for name, figure in figures.items()
        }
        answer.update(usage_lines_per_s=usage.per_s, clients=clients, seconds=seconds)
        if options["json"]:
            self.stdout.write(json.dumps(answer))
            return
        for name, figure in figures.items():
            self.stdout.write(
                f"{name:12} {figure.per_s:10,.0f} postings/s   p99 {figure.p99_ms:.1f} ms a call"
            )
        self.stdout.write(f"{'usage':12} {usage.per_s:10,.0f} lines/s      p99 {usage.p99_ms:.1f} ms a call")
