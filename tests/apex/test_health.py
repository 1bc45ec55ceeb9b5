"""Probes and the health matrix, with real parts that are really taken away."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg
import pytest
from django.core.cache import cache
from django.db import connection
from django.utils import timezone

from apex.health import checks
from apex.health.matrix import FAIL, PASS, WARN, Finding, Matrix
from apex.health.views import health_matrix, readiness
from apex.local.postgres import OWNER_ROLE, SUPERUSER
from apex.models import HealthProbe
from brokerage.models import Node, ServedModel
from ledger.models import Difference, InboundEvent, Verification
from ledger.services import open_wallet, platform_account
from tests.apex.waiting import wait_until
from tests.services import database_url

NAMES = [
    "database", "migrations", "cache", "broker", "workers", "gateway",
    "engine", "paypal", "providers", "nodes", "ledger",
]  # fmt: skip


class Loopback:
    """A small HTTP service that answers as it is told."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, dict]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, body = outer.answers.get(self.path, (404, {}))
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = do_PUT = answer  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    service = Loopback()
    yield service
    service.stop()


@pytest.fixture(autouse=True)
def forget_earlier_runs():
    health_matrix.cache_clear()
    readiness.cache_clear()


# --- the matrix itself ---


def test_the_worst_check_decides():
    def status(*found: str) -> str:
        return Matrix({str(n): lambda s=s: Finding(s, "") for n, s in enumerate(found)}).poll().status

    assert status(PASS, PASS) == PASS
    assert status(PASS, WARN) == WARN
    assert status(WARN, FAIL, PASS) == FAIL


def test_checks_run_at_the_same_time():
    both = threading.Barrier(2, timeout=30)

    def meet() -> Finding:
        both.wait()
        return Finding(PASS, "met")

    assert Matrix({"one": meet, "two": meet}, limit_s=60).poll().status == PASS


def test_a_flood_of_polls_costs_one_run():
    runs: list[int] = []

    def count() -> Finding:
        runs.append(1)
        return Finding(PASS, "")

    matrix = Matrix({"it": count}, share_s=60)
    threads = [threading.Thread(target=matrix.poll) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1


def test_every_poll_runs_the_checks():
    runs: list[int] = []
    matrix = Matrix({"it": lambda: runs.append(1) or Finding(PASS, "")}, share_s=0)
    matrix.poll()
    matrix.poll()
    assert len(runs) == 2


def test_a_hanging_check_fails_alone_and_is_not_started_twice():
    release, starts = threading.Event(), []

    def hang() -> Finding:
        starts.append(1)
        release.wait(120)
        return Finding(PASS, "at last")

    matrix = Matrix({"hangs": hang, "works": lambda: Finding(PASS, "fine")}, limit_s=0.05, share_s=0)

    def works_beside_it() -> bool:
        report = matrix.poll()
        assert report.checks["hangs"] == {"status": FAIL, "latency_ms": 50.0, "detail": "no answer in time"}
        return report.checks["works"]["status"] == PASS

    for _ in range(3):
        wait_until(works_beside_it)  # a busy machine may not come to a thread in so short a time
    wait_until(lambda: bool(starts))
    assert len(starts) == 1
    release.set()


def test_what_an_exception_says_is_not_shown(caplog):
    def broken() -> Finding:
        raise RuntimeError("password=hunter2 at db.internal")

    report = Matrix({"it": broken}).poll()
    assert report.checks["it"]["status"] == FAIL
    assert "hunter2" not in json.dumps(report.as_json()) + caplog.text


# --- probes ---


def test_healthz_needs_no_database(client):
    # No database fixture: any query would be refused.
    answer = client.get("/healthz", headers={"host": "10.0.0.7"})
    assert (answer.status_code, answer.json()) == (200, {"status": "pass"})


def test_readyz_when_all_is_there(client, fresh_database, redis_client):
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert set(answer.json()["checks"]) == {"database", "migrations", "cache"}


def test_readyz_without_cache(client, fresh_database, settings):
    settings.CACHES = {"default": settings.CACHES["default"] | {"LOCATION": "redis://127.0.0.1:1/0"}}
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"]["cache"]["status"] == FAIL
    assert answer.json()["checks"]["database"]["status"] == PASS


# --- the checks ---


def test_database_check_leaves_nothing_behind(fresh_database):
    assert checks.check_database().status == PASS
    assert HealthProbe.objects.count() == 0


def test_migrations_check_counts_what_is_missing(fresh_database):
    with psycopg.connect(database_url(fresh_database, OWNER_ROLE)) as owner:
        owner.execute("DELETE FROM django_migrations WHERE app = 'apex'")
    assert checks.check_migrations() == Finding(FAIL, "1 not applied")


def test_broker_check_sends_a_message_round_and_leaves_no_queue(redis_client):
    assert checks.check_broker().status == PASS
    assert [key for key in redis_client.keys("*") if "health" in key] == []


def test_worker_check_without_workers(redis_client, monkeypatch):
    monkeypatch.setattr(checks, "_WORKER_S", 0.2)
    assert checks.check_workers() == Finding(FAIL, "no worker answers")


def test_worker_check_with_a_real_worker(redis_client, postgres_server):
    worker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "apex",
            "worker",
            "-P",
            "solo",
            "-n",
            "platform@test",
            "-l",
            "warning",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while checks.check_workers().status != PASS:
            assert time.monotonic() < deadline
        assert checks.check_workers() == Finding(PASS, "a worker answers")
    finally:
        worker.terminate()
        worker.wait(timeout=20)


def test_gateway_and_engine_say_what_the_gateway_says(loopback, settings):
    settings.GATEWAY_PUBLIC_URL = loopback.url
    loopback.answers["/healthz"] = (
        200,
        {"status": "ok", "engine": "relay", "engine_detail": "auto: kernel has no BPF"},
    )
    assert checks.check_gateway().status == PASS
    assert checks.check_engine() == Finding(PASS, "relay: auto: kernel has no BPF")
    loopback.answers["/healthz"] = (200, {"status": "draining", "engine": "relay", "engine_detail": ""})
    assert checks.check_gateway().status == WARN
    loopback.answers["/healthz"] = (503, {"status": "fail", "engine": "relay", "engine_detail": "/usr/lib/x"})
    assert checks.check_gateway().status == FAIL
    assert checks.check_engine() == Finding(PASS, "relay")


def test_gateway_that_is_gone(settings, loopback):
    settings.GATEWAY_PUBLIC_URL = loopback.url
    loopback.stop()
    assert checks.check_gateway() == Finding(FAIL, "no answer")
    assert checks.check_engine().status == FAIL


@pytest.mark.django_db
def test_paypal_check_proves_the_credentials(loopback, settings):
    settings.PAYPAL_STUB_URL = loopback.url
    loopback.answers["/v1/oauth2/token"] = (200, {"access_token": "A21"})
    assert checks.check_paypal() == Finding(PASS, "signed in (stub); events applied, books compared")
    loopback.answers["/v1/oauth2/token"] = (401, {"error": "invalid_client"})
    assert checks.check_paypal() == Finding(FAIL, "refuses our credentials")


@pytest.mark.django_db
def test_paypal_check_warns_of_what_waits(loopback, settings):
    settings.PAYPAL_STUB_URL = loopback.url
    loopback.answers["/v1/oauth2/token"] = (200, {"access_token": "A21"})
    settings.PAYPAL_WEBHOOK_ID = ""
    common = {"channel": "paypal.webhook", "raw": b"", "verified": True}
    InboundEvent.objects.create(dedup_key="parked", parked_at=timezone.now(), **common)
    InboundEvent.objects.create(dedup_key="new", **common)
    Difference.objects.create(
        provider="paypal", kind="missing_here", external_id="X", day=timezone.now().date(), currency="USD"
    )
    found = checks.check_paypal()
    assert found.status == WARN
    for trouble in ("cannot be checked", "parked events wait", "differences to its own list wait"):
        assert trouble in found.detail
    assert "not applied" not in found.detail
    long_ago = timezone.now() - timedelta(hours=1)
    InboundEvent.objects.create(dedup_key="old", received_at=long_ago, **common)
    assert "events are not applied" in checks.check_paypal().detail


def test_nodes_check_calls_the_ready_ones(fresh_database, loopback):
    assert checks.check_nodes() == Finding(WARN, "no node yet")
    model = ServedModel.objects.create(name="m", context_tokens=2048)
    common = {"served_model": model, "host": "127.0.0.1", "port": loopback.port}
    Node.objects.create(name="a", state=Node.State.DRAINING, **common)
    assert checks.check_nodes() == Finding(FAIL, "no node is ready")
    Node.objects.create(name="b", state=Node.State.READY, **common)
    loopback.answers["/health"] = (200, {"status": "ok"})
    assert checks.check_nodes() == Finding(PASS, "1 of 1 ready nodes answer")
    Node.objects.create(name="c", state=Node.State.READY, served_model=model, host="127.0.0.1", port=1)
    assert checks.check_nodes() == Finding(WARN, "1 of 2 ready nodes answer")


def test_providers_check(fresh_database, loopback, settings):
    assert checks.check_providers() == Finding(PASS, "own nodes only")
    settings.IMDS_AWS_URL = "http://127.0.0.1:1"
    assert checks.check_providers().status == WARN
    settings.IMDS_AWS_URL = loopback.url
    assert checks.check_providers() == Finding(PASS, "own nodes only; the metadata service answers")


# --- the whole of it over HTTP ---


def test_matrix_has_every_part_and_tells_nobody_where_they_are(
    client, fresh_database, settings, loopback, redis_client
):
    settings.GATEWAY_PUBLIC_URL = settings.PAYPAL_STUB_URL = loopback.url
    answer = client.get("/v1/platform/health-matrix")
    body = answer.json()
    assert list(body["checks"]) == NAMES
    assert body["status"] == FAIL
    assert answer.status_code == 503
    assert body["version"] == settings.VERSION
    assert body["checked_at"].endswith("Z")
    assert "no-store" in answer.headers["Cache-Control"]
    for name in ("database", "migrations", "cache", "broker", "ledger"):
        assert body["checks"][name]["status"] == PASS, name
    text = answer.text
    for secret in ("127.0.0.1", str(loopback.port), "/tmp", "Error", connection.settings_dict["NAME"]):
        assert secret not in text


def test_status_page_shows_the_same_to_people(client, fresh_database, redis_client):
    page = client.get("/status/")
    assert page.status_code == 200
    for name in NAMES:
        assert f'<th scope="row">{name}</th>' in page.text
    part = client.get("/status/", headers={"HX-Request": "true"})
    assert "<html" not in part.text
    assert cache.get("anything") is None


def test_ledger_check_finds_a_journal_that_does_not_balance(fresh_database):
    """The guards make such a journal impossible, so they are switched off for this one."""
    assert checks.check_ledger().status == PASS
    wallet = open_wallet(code="w", owner="w", currency="USD")
    source = platform_account(code="promo_deferred", currency="USD")
    with psycopg.connect(database_url(fresh_database, SUPERUSER)) as superuser:
        superuser.execute(
            "ALTER TABLE ledger_entries DISABLE TRIGGER ALL; ALTER TABLE ledger_journal DISABLE TRIGGER ALL"
        )
        superuser.execute(
            "INSERT INTO ledger_journal (id, public_id, kind, currency, idem_scope, idem_key, request_hash,"
            " effective_at, actor, meta) VALUES (7, gen_random_uuid(), 'x', 'USD', 's', 'k', '', now(), 'a', '{}')"
        )
        for account, amount in ((wallet, 5), (source, -4)):
            superuser.execute(
                "INSERT INTO ledger_entries (journal_id, account_id, amount, amount_currency) VALUES (7, %s, %s, 'USD')",
                [account.pk, amount],
            )
    assert checks.check_ledger() == Finding(FAIL, "1 journals do not sum to zero")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("hours_ago", "ok", "status", "says"),
    [
        (1, True, PASS, "all checks of the last proof hold"),
        (40, True, WARN, "not proved for a day"),
        (1, False, FAIL, "1 checks of the last proof do not hold"),
    ],
)
def test_ledger_check_tells_of_the_last_proof(hours_ago, ok, status, says):
    then = timezone.now() - timedelta(hours=hours_ago)
    rows = [{"name": "balances_equal_entries", "ok": ok, "rows": []}]
    Verification.objects.create(started_at=then, finished_at=then, ok=ok, checks=rows)
    found = checks.check_ledger()
    assert (found.status, says in found.detail) == (status, True)


@pytest.mark.django_db
def test_ledger_check_tells_of_an_audit_trail_that_nobody_seals(monkeypatch):
    monkeypatch.setattr(checks, "audit_lag", lambda: timedelta(minutes=5))
    assert checks.check_ledger() == Finding(WARN, "the audit trail is not being sealed")
