"""The platform's own processes under `manage.py up`: it starts, survives, stops, and starts after the worst."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest

from apex.local.paths import BASE_DIR
from apex.local.postgres import OWNER_ROLE, EmbeddedPostgres
from apex.local.stack import Stack
from apex.local.state import StateFolder
from apex.local.valkey import EmbeddedValkey
from tests.apex.embedded import bare_environment, var_folder
from tests.apex.test_supervisor import marked
from tests.apex.waiting import wait_until


@pytest.fixture(scope="module")
def shared_var() -> Iterator[Path]:
    with var_folder() as var:
        EmbeddedPostgres.at(var).initialise()
        yield var


@pytest.fixture
def var(shared_var: Path) -> Iterator[Path]:
    assert marked(shared_var) == []
    yield shared_var
    assert marked(shared_var) == []


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Up:
    """`manage.py up` in a process of its own; its output is read to the end by a thread."""

    def __init__(self, var: Path, *argv: str, **environ: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "up", *argv],
            env=bare_environment(var, **environ),
            cwd=BASE_DIR,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_ready(self) -> None:
        wait_until(lambda: self._is_ready() or self.process.poll() is not None, timeout_s=120)
        assert self._is_ready(), self.lines

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left running, however the test ended."""
        self.end(None if self.process.poll() is not None else signal.SIGTERM)

    def _is_ready(self) -> bool:
        return "up: everything is ready; Ctrl-C stops it" in self.lines

    def end(self, how: signal.Signals | None = None) -> int:
        if how is not None:
            self.process.send_signal(how)
        with self.process:
            status = self.process.wait(timeout=60)
            self._reader.join()
        return status


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_up_starts_in_order_and_ends_cleanly_in_reverse(var, how):
    up = Up(var, "migrate", "beat", "--quiet")
    up.wait_ready()
    assert up.end(how) == 0
    ready = [line.split()[1] for line in up.lines if " ready in " in line]
    assert sorted(ready[:2]) == ["postgres", "valkey"]
    assert ready[2:] == ["migrate", "beat"]
    stopped = [line.split()[1] for line in up.lines[:-1] if line.endswith(" stopped")]
    assert stopped == ["beat", "valkey", "postgres"]
    assert up.lines[-1] == "up: stopped"
    assert not EmbeddedPostgres.at(var).is_running()
    assert not EmbeddedValkey.at(var).is_running()


def test_up_starts_again_after_kill_9_of_itself(var):
    first = Up(var, "migrate", "beat", "--quiet")
    first.wait_ready()
    before = set(marked(var))
    assert len(before) >= 2
    first.end(signal.SIGKILL)
    second = Up(var, "migrate", "beat", "--quiet")
    second.wait_ready()
    assert before & set(marked(var)) == set()
    assert second.end(signal.SIGTERM) == 0
    assert StateFolder(var).read() == {}


def test_a_second_up_on_the_same_folder_is_refused_in_one_line(var):
    first = Up(var, "beat", "--quiet")
    first.wait_ready()
    second = Up(var, "beat", "--quiet")
    assert second.end() == 1
    [line] = second.lines
    assert f"a stack already runs on {var} (pid {first.process.pid})" in line
    assert first.end(signal.SIGTERM) == 0


def test_a_taken_port_that_was_asked_for_is_told_in_one_line(var):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        up = Up(var, "web", APEX_WEB_PORT=str(port))
        assert up.end() == 1
    [line] = up.lines
    assert f"APEX_WEB_PORT={port} is taken by " in line
    assert f"(pid {os.getpid()})" in line


def test_with_a_server_of_ones_own_up_runs_only_what_is_asked_for(var):
    production = {
        "DATABASE_URL": "postgresql://apex@db.example.com/apex",
        "REDIS_URL": "redis://kv.example.com",
        "SECRET_KEY": "x" * 50,
        "ALLOWED_HOSTS": "apex.example.com",
        "PAYPAL_MODE": "stub",
    }
    up = Up(var, **production)
    assert up.end() == 1
    [line] = up.lines
    assert "DATABASE_URL names a server of yours, so say what to run" in line
    stack = Stack(only=["web"], nodes=(), environ=bare_environment(var, **production))
    assert [spec.name for step in stack._steps() for spec in step if stack._wants(spec.name)] == ["web"]


def test_an_unknown_process_is_told_with_those_there_are(var):
    up = Up(var, "wbe")
    assert up.end() == 1
    assert (
        "unknown process wbe: choose from migrate, collectstatic, paypal-stub, metadata, web" in up.lines[0]
    )


def test_no_secret_is_on_a_command_line(var):
    environ = bare_environment(
        var,
        SECRET_KEY="hunter2" * 8,
        PAYPAL_CLIENT_SECRET="hunter2",
        REDIS_URL="redis://:hunter2@kv.example.com",
    )
    stack = Stack(environ=environ)
    specs = [spec for step in stack._steps() for spec in step]
    assert {spec.name for spec in specs} >= {
        "web",
        "worker",
        "beat",
        "gateway",
        "node-a",
        "node-b",
        "paypal-stub",
    }
    assert [spec.name for spec in specs if "hunter2" in " ".join(spec.argv)] == []


def test_every_process_is_told_the_addresses_that_were_chosen(var):
    stack = Stack(environ=bare_environment(var, APEX_GATEWAY_PUBLIC_URL="https://llm.example.com"))
    specs = {spec.name: spec.environ for step in stack._steps() for spec in step}
    for name in ("web", "worker", "beat", "gateway"):
        assert specs[name]["APEX_PUBLIC_URL"] == f"http://127.0.0.1:{stack.addresses['APEX_WEB_PORT']}"
        assert specs[name]["APEX_GATEWAY_PUBLIC_URL"] == "https://llm.example.com"
        assert specs[name]["PAYPAL_STUB_URL"] == stack.addresses["PAYPAL_STUB_URL"]
    assert specs["node-a"]["IMDS_AWS_URL"] == f"{stack.addresses['IMDS_AWS_URL']}/node-a"
    assert specs["node-a"]["APEX_NODE_PORT"] != specs["node-b"]["APEX_NODE_PORT"]
    assert int(specs["node-b"]["APEX_NODE_PORT"]) == stack.node_port("node-b")


def test_the_real_payment_provider_needs_no_stand_in(var):
    environ = bare_environment(var, PAYPAL_MODE="sandbox", PAYPAL_CLIENT_ID="a", PAYPAL_CLIENT_SECRET="b")
    stack = Stack(environ=environ)
    assert "PAYPAL_STUB_URL" not in stack.addresses
    assert "paypal-stub" not in {spec.name for step in stack._steps() for spec in step}


def test_postgres_comes_back_after_kill_9_with_what_was_committed(var):
    database = EmbeddedPostgres.at(var)
    with Stack(only=["postgres"], nodes=(), environ=bare_environment(var)) as stack:
        with psycopg.connect(database.url(OWNER_ROLE)) as connection:
            connection.execute("CREATE TABLE survivor AS SELECT 1 AS id")
        server = stack.process("postgres")
        backends = psutil.Process(server.pid).children()
        server.kill()
        server.wait_ready(60)
        wait_until(lambda: not any(is_alive(backend) for backend in backends))
        with psycopg.connect(database.url(OWNER_ROLE)) as connection:
            assert connection.execute("SELECT count(*) FROM survivor").fetchone() == (1,)
            connection.execute("DROP TABLE survivor")
        assert stack.failure is None


def test_the_web_door_opens_at_the_address_that_up_prints(var):
    up = Up(var, "migrate", "collectstatic", "web", "--quiet")
    up.wait_ready()
    [url] = [line.split()[-1] for line in up.lines if line.startswith("up: portal ")]
    with urllib.request.urlopen(url.replace("/portal/", "/healthz")) as response:
        assert response.status == 200
    assert up.end(signal.SIGTERM) == 0


def test_the_gateway_is_replaced_while_clients_connect(var):
    environ = bare_environment(var, APEX_ENGINE="relay")
    with Stack(only=["migrate", "gateway"], nodes=(), environ=environ) as stack:
        old, refused, enough = stack.process("gateway").pid, [], threading.Event()

        def knock() -> None:
            while not enough.is_set():
                try:
                    urllib.request.urlopen(f"{stack.gateway_url}/healthz", timeout=10).close()
                except OSError as error:
                    refused.append(error)

        knocking = threading.Thread(target=knock)
        knocking.start()
        stack.replace_gateway()
        assert stack.process("gateway").pid not in {None, old}
        wait_until(lambda: not psutil.pid_exists(old), timeout_s=30)
        enough.set()
        knocking.join()
        assert refused == []
        assert stack.failure is None


def test_sighup_makes_up_replace_its_gateway_and_go_on(var):
    """Who is connected is answered by the old one, who comes by the new one, and `up` knows both."""
    with Up(var, "migrate", "gateway", "--quiet", APEX_ENGINE="relay") as up:
        [url] = [line.split()[-1] for line in up.lines if re.match("up: gateway +http", line)]
        place = urlsplit(url)
        assert place.hostname is not None
        before = gateways(up)
        assert len(before) == 1
        connected = HTTPConnection(place.hostname, place.port or 80, timeout=60)
        connected.request("GET", "/healthz")
        assert connected.getresponse().read()
        up.process.send_signal(signal.SIGHUP)
        wait_until(lambda: gateways(up) - before, timeout_s=60)
        connected.request("GET", "/healthz")
        assert json.loads(connected.getresponse().read())["status"] in {"ok", "draining"}
        connected.close()
        wait_until(lambda: not gateways(up) & before, timeout_s=60)
        with urllib.request.urlopen(f"{place.scheme}://{place.netloc}/healthz", timeout=60) as response:
            assert json.loads(response.read())["status"] == "ok"
        assert up.process.poll() is None
        assert up.end(signal.SIGTERM) == 0


def gateways(up: Up) -> set[int]:
    """Those that `up` runs and that have not ended."""
    return {
        child.pid
        for child in psutil.Process(up.process.pid).children(recursive=True)
        if is_alive(child) and "gateway" in child.cmdline()
    }
