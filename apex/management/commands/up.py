"""The platform in the foreground: `make up`. Ends cleanly on Ctrl-C and SIGTERM; a second one hurries.

SIGHUP replaces the gateway by a new one, without a refused connection or a broken answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from apex.local.stack import NODES, SERVICES, Stack, model_is_installed


class Command(BaseCommand):
    help = "Runs the platform in the foreground on the embedded defaults, or those processes of it that are named."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "processes", nargs="*", metavar="PROCESS", help=f"of: {', '.join((*SERVICES, *NODES))}"
        )
        parser.add_argument("--no-nodes", action="store_true", help="without the two local inference nodes")
        parser.add_argument("--quiet", action="store_true", help="log lines go to var/log only")

    def handle(self, *, processes: list[str], no_nodes: bool, quiet: bool, **_: Any) -> None:
        if unknown := sorted(set(processes) - {*SERVICES, *NODES}):
            raise CommandError(
                f"unknown process {', '.join(unknown)}: choose from {', '.join((*SERVICES, *NODES))}"
            )
        if os.environ.get("DATABASE_URL", "").strip() and not processes:
            raise CommandError(
                "DATABASE_URL names a server of yours, so say what to run, for example: "
                "manage.py up web worker beat gateway"
            )
        nodes = () if no_nodes else NODES
        if nodes and not processes and not model_is_installed():
            self.stdout.write(
                "up: no inference nodes, for the model is not installed (requirements-demo.txt)"
            )
            nodes = ()
        stack = Stack(
            nodes=nodes, only=processes, console=None if quiet else sys.stdout, progress=self._report
        )  # fmt: skip
        _interrupt_on_signals(stack)
        signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=self._replace, args=(stack,)).start())
        try:
            with stack:
                for name, url in stack.urls().items():
                    self.stdout.write(f"up: {name:<13} {url}")
                self.stdout.write("up: everything is ready; Ctrl-C stops it")
                self.stdout.flush()
                stack.wait()
        except KeyboardInterrupt:
            self.stdout.write("up: stopped")
        except RuntimeError as error:
            raise CommandError(str(error)) from None

    def _replace(self, stack: Stack) -> None:
        try:
            stack.replace_gateway()
        except RuntimeError as error:
            self._report("gateway", f"is not replaced: {error}")

    def _report(self, name: str, what: str) -> None:
        self.stdout.write(f"up: {name} {what}")
        self.stdout.flush()


def _interrupt_on_signals(stack: Stack) -> None:
    """The first signal interrupts whatever goes on, so that the stack is stopped; the next ones hurry it."""
    seen = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            stack.hurry()
            return
        seen = True
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
