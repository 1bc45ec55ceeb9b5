"""`make demo`: the whole platform on embedded defaults, and the story it exists for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from apex.demo.report import Report
from apex.demo.screen import Screen
from apex.demo.story import Story, StoryFailed, give_back
from apex.local.paths import BASE_DIR
from apex.local.stack import Stack, model_is_installed


class Command(BaseCommand):
    help = "Starts the platform, loses a node in mid-answer, proves that nobody noticed, and keeps serving."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="end after the story; status 0 only if all promises held"
        )

    def handle(self, *, once: bool, **_: Any) -> None:
        if not model_is_installed():
            raise CommandError("the demo's language model is not installed: run it through `make demo`")
        signal.signal(signal.SIGTERM, _interrupt)
        screen = Screen()
        screen.scene("Apex starts")
        stack = Stack(console=None, progress=lambda name, what: screen.say(f"{name} {what}"))
        try:
            with stack:
                report = self._tell(stack, screen)
                if once:
                    if not report.kept:
                        raise CommandError("not every promise held; see the table above and var/log")
                    return
                give_back(stack)
                screen.scene("Apex keeps serving; Ctrl-C ends it")
                stack.wait()
        except KeyboardInterrupt:
            screen.scene("stopped")
        except RuntimeError as error:
            raise CommandError(str(error)) from None

    def _tell(self, stack: Stack, screen: Screen) -> Report:
        credentials = _seed(stack)
        report = Story(stack, screen, credentials).tell()
        report.write(settings.VAR_DIR / "demo-report.json")
        screen.result(report)
        screen.log_ins(report, credentials)
        return report


def _seed(stack: Stack) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "manage.py", "seed_demo", "--json"],
        cwd=BASE_DIR,
        env=stack.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StoryFailed(f"the demo's customers could not be made: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
