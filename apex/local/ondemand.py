"""Lets `python manage.py COMMAND` work on a checkout where nothing runs.

Without DATABASE_URL and REDIS_URL the embedded servers are the servers. When `make up` runs they are
there already; otherwise the first command starts them and the last one stops them. Who uses them is
told by a shared file lock, so a killed command counts no longer, and the next one to end tidies up.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from apex.env import fail
from apex.local.paths import var_dir
from apex.local.postgres import EmbeddedPostgres
from apex.local.state import MARK, StateFolder
from apex.local.valkey import EmbeddedValkey

# These either start the servers themselves or need none.
_WITHOUT_SERVICES = {
    "help",
    "version",
    "--help",
    "--version",
    "up",
    "demo",
    "collectstatic",
    "check",
    "spectacular",
}
# Schema changes need the owner of the tables, everything else must get by with the app role.
_AS_OWNER = {"migrate", "sqlmigrate", "flush"}
_WAIT_FOR_STACK_S = 60.0
_WAIT_FOR_COMMANDS_S = 15.0
_POLL_S = 0.05


class ServersInUse(RuntimeError):
    """A stack wants servers that a running command holds; the message says what to do."""


@contextmanager
def services_for_command(argv: Sequence[str]) -> Iterator[None]:
    command = argv[1] if len(argv) > 1 else "help"
    if command in _AS_OWNER:
        os.environ["APEX_DB_ROLE"] = "owner"
    with ExitStack() as stack:
        # A process of the stack has its servers, and outlives none of them.
        if command not in _WITHOUT_SERVICES and MARK not in os.environ:
            try:
                stack.enter_context(embedded_services())
            except OSError as error:
                fail([f"APEX_VAR_DIR cannot be used: {error.filename}: {error.strerror}"])
            except RuntimeError as error:
                sys.exit(f"apex: {error}")
        yield


@contextmanager
def embedded_services() -> Iterator[None]:
    """Keeps the embedded servers running for as long as the block lasts, shared with other commands."""
    database = None if os.environ.get("DATABASE_URL", "").strip() else EmbeddedPostgres.default()
    store = None if os.environ.get("REDIS_URL", "").strip() else EmbeddedValkey.default()
    if database is None and store is None:
        yield
        return
    var = var_dir()
    with _users_file(var) as users:
        if _join(var, users, database, store):
            try:
                yield
            finally:
                _leave(var, users, database, store)
        else:
            yield


@contextmanager
def no_command_uses_the_servers(var: Path) -> Iterator[None]:
    """For a stack about to start: in the block no command can start servers. Raises ServersInUse.

    Servers that killed commands left behind are stopped first.
    """
    deadline = time.monotonic() + _WAIT_FOR_COMMANDS_S
    with _users_file(var) as users:
        while True:
            with _starting_or_stopping(var):
                if _try_lock(users):
                    EmbeddedPostgres.at(var).stop()
                    EmbeddedValkey.at(var).stop()
                    yield
                    return
                if StateFolder(var).is_locked():
                    yield  # the lock of the stack has the better message
                    return
            if time.monotonic() > deadline:
                raise ServersInUse(
                    f"another manage.py command uses the embedded servers in {var}: wait until it ends, or end it"
                )
            time.sleep(_POLL_S)


def _join(var: Path, users: IO[str], database: EmbeddedPostgres | None, store: EmbeddedValkey | None) -> bool:
    """Makes sure the servers run; True when we are among those who keep them, False when a stack does."""
    deadline = time.monotonic() + _WAIT_FOR_STACK_S
    while True:
        with _starting_or_stopping(var):
            if not StateFolder(var).is_locked():
                _start(database, store)
                fcntl.flock(users, fcntl.LOCK_SH)
                return True
        if (database is None or database.is_running()) and (store is None or store.is_running()):
            return False
        if time.monotonic() > deadline:
            raise RuntimeError(f"the stack on {var} is running, but its servers do not answer")
        time.sleep(_POLL_S)


def _leave(
    var: Path, users: IO[str], database: EmbeddedPostgres | None, store: EmbeddedValkey | None
) -> None:
    with _starting_or_stopping(var):
        fcntl.flock(users, fcntl.LOCK_UN)
        if _try_lock(users):
            if database is not None:
                database.stop()
            if store is not None:
                store.stop()


def _start(database: EmbeddedPostgres | None, store: EmbeddedValkey | None) -> None:
    # In sessions of their own: Ctrl-C at one command must not end the servers of another.
    if database is not None:
        if not database.is_running():
            process = database.spawn(
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            database.wait_ready(process)
        database.provision()
    if store is not None and not store.is_running():
        process = subprocess.Popen(
            store.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        store.wait_ready(process)


def _users_file(var: Path) -> IO[str]:
    path = var / "run" / "servers.users"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8")


@contextmanager
def _starting_or_stopping(var: Path) -> Iterator[None]:
    """Only one process at a time decides whether the servers have to run."""
    with (var / "run" / "servers.lock").open("a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _try_lock(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
