"""Commands on a checkout where nothing runs: they share servers, and the last one stops them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex.local.ondemand import ServersInUse, no_command_uses_the_servers
from apex.local.paths import BASE_DIR
from apex.local.postgres import EmbeddedPostgres
from apex.local.state import MARK, StateFolder
from apex.local.valkey import EmbeddedValkey
from tests.apex.embedded import bare_environment, var_folder

# Uses the servers until its input ends; answers each line with what the database says.
_COMMAND = """
    import itertools
    import sys
    import psycopg
    from apex.local.ondemand import embedded_services
    from apex.local.postgres import EmbeddedPostgres
    from apex.local.valkey import EmbeddedValkey
    with embedded_services():
        for line in itertools.chain(["first"], sys.stdin):
            with psycopg.connect(EmbeddedPostgres.default().url()) as connection:
                answer = connection.execute("SELECT 'alive'").fetchone()[0]
            print(answer if EmbeddedValkey.default().is_running() else "no valkey", flush=True)
"""


class Command:
    def __init__(self, var: Path, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_COMMAND)],
            env=bare_environment(var, **environ),
            cwd=BASE_DIR,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> int:
        with self.process:
            pass
        return self.process.returncode

    def kill(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture(scope="module")
def shared_var() -> Iterator[Path]:
    with var_folder() as var:
        EmbeddedPostgres.at(var).initialise()
        yield var


@pytest.fixture
def var(shared_var: Path) -> Path:
    assert not servers_run(shared_var)
    return shared_var


def servers_run(var: Path) -> bool:
    running = {EmbeddedPostgres.at(var).is_running(), EmbeddedValkey.at(var).is_running()}
    assert len(running) == 1, "one server without the other"
    return running.pop()


def test_a_command_finds_servers_and_leaves_none(var):
    command = Command(var)
    assert command.answer() == "alive"
    assert command.end() == 0
    assert not servers_run(var)


def test_the_second_command_keeps_the_servers_that_the_first_one_started(var):
    first = Command(var)
    assert first.answer() == "alive"
    second = Command(var)
    assert second.answer() == "alive"
    assert first.end() == 0
    assert second.ask() == "alive"
    assert second.end() == 0
    assert not servers_run(var)


def test_commands_that_begin_and_end_at_the_same_time(var):
    commands = [Command(var) for _ in range(4)]
    assert [command.answer() for command in commands] == ["alive"] * 4
    for command in commands:
        assert command.process.stdin is not None
        command.process.stdin.close()
    assert [command.process.wait(timeout=60) for command in commands] == [0] * 4
    for command in commands:
        command.end()
    assert not servers_run(var)


def test_what_a_killed_command_left_the_next_one_uses_and_stops(var):
    killed = Command(var)
    assert killed.answer() == "alive"
    killed.kill()
    assert servers_run(var)
    following = Command(var)
    assert following.answer() == "alive"
    following.end()
    assert not servers_run(var)


def test_a_stack_takes_over_what_a_killed_command_left(var):
    killed = Command(var)
    assert killed.answer() == "alive"
    killed.kill()
    with no_command_uses_the_servers(var):
        assert not servers_run(var)


def test_a_stack_does_not_take_the_servers_from_a_running_command(var, monkeypatch):
    monkeypatch.setattr("apex.local.ondemand._WAIT_FOR_COMMANDS_S", 0.2)
    command = Command(var)
    assert command.answer() == "alive"
    with pytest.raises(ServersInUse, match="wait until it ends, or end it"), no_command_uses_the_servers(var):
        pass
    assert command.ask() == "alive"
    command.end()


def test_a_command_uses_the_servers_of_a_running_stack_and_leaves_them_running(var):
    environ = {MARK: str(var)}
    with StateFolder(var).lock():  # what a stack holds
        command = Command(var)
        database, store = EmbeddedPostgres.at(var), EmbeddedValkey.at(var)
        postgres = database.spawn(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        valkey = subprocess.Popen(store.command(), stdout=subprocess.DEVNULL, env=environ)
        assert command.answer() == "alive"
        command.end()
        assert servers_run(var)
        database.stop()
        store.stop()
        postgres.wait()
        valkey.wait()


def test_with_servers_named_by_the_environment_none_is_started(var):
    command = Command(
        var, DATABASE_URL="postgresql://db.example.com/apex", REDIS_URL="redis://kv.example.com"
    )
    assert command.answer() == ""  # it cannot reach them here, and fell
    command.end()
    assert not servers_run(var)


def test_manage_py_runs_a_command_with_the_rights_it_needs(var):
    def manage(*argv: str) -> subprocess.CompletedProcess[str]:
        argv = (sys.executable, "manage.py", *argv)
        return subprocess.run(argv, env=bare_environment(var), cwd=BASE_DIR, capture_output=True, text=True)

    migrated = manage("migrate", "--verbosity=0")
    assert (migrated.returncode, migrated.stderr) == (0, "")
    program = (
        "from django.db import connection as c; print(c.cursor().execute('SELECT current_user').fetchone())"
    )
    assert manage("shell", "--no-imports", "-c", program).stdout == "('apex_app',)\n"
    assert not servers_run(var)
