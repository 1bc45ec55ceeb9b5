"""The embedded Valkey: socket only, and queued work survives its death."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import psutil
import pytest
import redis

from apex.local.valkey import EmbeddedValkey
from tests.apex.embedded import var_folder


@pytest.fixture
def store() -> Iterator[EmbeddedValkey]:
    with var_folder() as var:
        yield EmbeddedValkey.at(var)


def start(store: EmbeddedValkey) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(store.command(), stdout=subprocess.DEVNULL)
    store.wait_ready(process)
    return process


def test_it_answers_on_its_socket_and_nowhere_else(store):
    process = start(store)
    with redis.Redis.from_url(store.url) as client:
        assert client.ping()
    assert [
        c for c in psutil.Process(process.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    ] == []
    assert store.socket.stat().st_mode & 0o077 == 0
    store.stop()
    assert process.wait(timeout=20) == 0
    assert not store.is_running()


def test_queued_work_survives_kill_9(store):
    process = start(store)
    with redis.Redis.from_url(store.url) as client:
        client.rpush("celery", "task")
        client.execute_command("WAITAOF", 1, 0, 5000)  # what the server writes once a second anyway
    process.kill()
    process.wait()
    process = start(store)
    with redis.Redis.from_url(store.url) as client:
        assert client.lrange("celery", 0, -1) == [b"task"]
    store.stop()
    process.wait()


def test_stop_without_a_server_does_nothing(store):
    store.stop()
