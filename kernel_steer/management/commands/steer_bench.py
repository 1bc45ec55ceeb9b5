"""`manage.py steer_bench`: the figures of an eviction on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from kernel_steer.measure import api, ports
from kernel_steer.measure.machine import BenchFailed

_DOORS = {"ports": ports.measure, "api": api.measure}


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above zero, not {text!r}")
    return int(text)


class Command(BaseCommand):
    help = "Measures flip and reroute over the real signal path, beside live connections that must not lose a byte."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--engine", choices=["auto", "kernel", "relay"], default=settings.STEER_ENGINE)
        parser.add_argument(
            "--door",
            choices=_DOORS,
            default="ports",
            help="a steered port, or the API with answers that stream",
        )
        parser.add_argument("--flows", type=_positive, default=200, help="live connections meanwhile")
        parser.add_argument("--flips", type=_positive, default=100)
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        quiet = options["json"]
        try:
            result = _DOORS[options["door"]](
                engine=options["engine"],
                flows=options["flows"],
                flips=options["flips"],
                redis_url=settings.REDIS_URL,
                say=(lambda text: None) if quiet else self.stdout.write,
            )
        except BenchFailed as error:
            raise CommandError(str(error)) from None
        figures = result.as_json()
        if quiet:
            self.stdout.write(json.dumps(figures))
            return
        for name, value in figures.items():
            self.stdout.write(f"{name:<18} {value}")
