"""Lets `python manage.py COMMAND` work on a checkout where nothing runs.

Without DATABASE_URL and REDIS_URL the embedded servers are the servers. When `make up` runs they are
there already; otherwise they are started for the length of the command and stopped after it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

# These either start the servers themselves or need none.
_WITHOUT_SERVICES = {"help", "version", "--help", "--version", "up", "demo", "makemigrations", "collectstatic", "check", "spectacular", "startproject"}
# Schema changes need the owner of the tables, everything else must get by with the app role.
_AS_OWNER = {"migrate", "sqlmigrate", "flush"}


@contextmanager
def services_for_command(argv: Sequence[str]) -> Iterator[None]:
    command = argv[1] if len(argv) > 1 else "help"
    if command in _AS_OWNER:
        os.environ["APEX_DB_ROLE"] = "owner"
    with ExitStack() as stack:
        if command not in _WITHOUT_SERVICES:
            try:
                stack.enter_context(embedded_services())
            except RuntimeError as error:
                sys.exit(f"apex: {error}")
        yield


@contextmanager
def embedded_services(*, postgres: bool = True, valkey: bool = True) -> Iterator[None]:
    """Runs what is needed and not yet there; leaves alone what another process runs."""
    from apex.local.postgres import EmbeddedPostgres
    from apex.local.valkey import EmbeddedValkey

    with ExitStack() as stack:
        if postgres and not os.environ.get("DATABASE_URL"):
            database = EmbeddedPostgres.default()
            if not database.is_running():
                process = database.spawn(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
                stack.callback(_stop, process, signal.SIGINT)
                database.wait_ready(process)
            database.provision()
        if valkey and not os.environ.get("REDIS_URL"):
            store = EmbeddedValkey.default()
            if not store.is_running():
                process = subprocess.Popen(
                    store.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
                )
                stack.callback(_stop, process, signal.SIGTERM)
                store.wait_ready(process)
        yield


def _stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(how)
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
