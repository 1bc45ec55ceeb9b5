"""`manage.py gateway`: the front door for inference."""

from __future__ import annotations

import argparse
from typing import Any

import uvloop
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils.module_loading import import_string

from kernel_steer.engine import EngineUnavailable
from kernel_steer.gateway.journals import JournalsTaken
from kernel_steer.gateway.server import AddressInUse, Config, serve


class Command(BaseCommand):
    help = "Serves the OpenAI-compatible API and keeps answers alive through evictions."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--host", default=settings.GATEWAY_HOST)
        parser.add_argument("--port", type=int, default=settings.GATEWAY_PORT)
        parser.add_argument("--engine", choices=["auto", "kernel", "relay"], default=settings.STEER_ENGINE)
        parser.add_argument("--drain", type=float, default=settings.GATEWAY_DRAIN_S, metavar="SECONDS")
        parser.add_argument(
            "--take-over",
            action="store_true",
            help="Follow the gateway that has the port now: it hands its listening socket over and drains.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        config = Config(
            host=options["host"],
            port=options["port"],
            engine=options["engine"],
            state_dir=settings.VAR_DIR / f"gateway-{options['port']}",
            redis_url=settings.REDIS_URL,
            signal_key=settings.STEER_SIGNAL_KEY,
            signal_host=settings.STEER_SIGNAL_HOST,
            signal_port=settings.STEER_SIGNAL_PORT,
            answers_max=settings.STEER_KERNEL_FLOWS,
            drain_s=options["drain"],
            take_over=options["take_over"],
            on_refused_signals=import_string(settings.STEER_REFUSED_SIGNALS),
        )
        try:
            uvloop.run(serve(config, import_string(settings.STEER_ADMISSION)()))
        except (AddressInUse, EngineUnavailable, JournalsTaken) as error:
            raise CommandError(str(error)) from error
