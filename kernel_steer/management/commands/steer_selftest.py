"""`manage.py steer_selftest`: may the kernel engine be used on this machine, and if not, why?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand

from kernel_steer.engine.kernel import selftest
from kernel_steer.ports import selftest as ports_selftest


class Command(BaseCommand):
    help = (
        "Asks the running kernel everything the kernel engine and steered ports build on."
        " Exit code 0 when the engine may be used."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object: engine, ok, checks, ports")

    def handle(self, *args: Any, **options: Any) -> None:
        checks = selftest.run()
        ok = all(check.ok for check in checks)
        engine = "kernel" if ok else "relay"
        # The engine does not need them: where they fail, only steered ports are relayed.
        ports = ports_selftest.run() if ok else []
        if options["json"]:
            report = {"engine": engine, "ok": ok, "checks": checks, "ports": ports}
            self.stdout.write(json.dumps(report, default=asdict))
        else:
            for check in [*checks, *ports]:
                self.stdout.write(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}")
            self.stdout.write(f"engine: {engine}")
        if not ok:
            sys.exit(1)
