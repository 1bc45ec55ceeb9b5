"""The sealed audit trail: no fork, no gap, and every kind of tampering found and named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import psycopg
import pytest
from django.core.management import call_command
from django.utils import timezone
from psycopg import errors

from apex.local.postgres import APP_ROLE, SUPERUSER
from ledger.audit import AuditReport, Fault, heads, seal_events, verify_audit
from ledger.models import AuditEvent, AuditSeal
from ledger.selectors import audit_lag
from ledger.services import record_audit_event
from ledger.tasks import seal_audit_events
from tests.services import database_url

INSERT = """
INSERT INTO audit_events (shard, actor, action, object_type, object_id, request_id, before, after)
VALUES (%s, 'me', 'did', 'thing', %s, '', NULL, '{"weight": 1.50, "ä": ["b", null]}') RETURNING id
"""


@pytest.fixture
def trail(fresh_database, settings, tmp_path) -> str:
    """An empty trail with a folder of its own for the heads. The value is the database's name."""
    settings.VAR_DIR = tmp_path
    return fresh_database


def record(count: int) -> None:
    for number in range(count):
        record_audit_event(
            actor="änne",
            action="price.set",
            object_type="model",
            object_id=str(number),
            before={"rate": "0.1", "nothing": None} if number % 2 else None,
            after={"rate": 1.5, "tags": ["ü", 2]},
        )


def connect(name: str, role: str = APP_ROLE, **options) -> psycopg.Connection:
    return psycopg.connect(database_url(name, role), **options)


def fault() -> Fault:
    report = verify_audit()
    assert not report.ok
    assert report.fault is not None
    return report.fault


def test_it_seals_and_verifies(trail):
    record(7)
    assert verify_audit() == AuditReport(True, 0, 0, 7, None)
    assert seal_audit_events() == 7
    assert seal_audit_events() == 0
    assert verify_audit() == AuditReport(True, 7, 1, 0, None)
    record(3)
    assert seal_audit_events() == 3
    assert verify_audit() == AuditReport(True, 10, 2, 0, None)
    out = StringIO()
    call_command("audit_verify", "--json", stdout=out)
    assert json.loads(out.getvalue()) == {"ok": True, "links": 10, "heads": 2, "unsealed": 0, "fault": None}


def test_each_shard_has_a_chain_of_its_own(trail):
    with connect(trail) as app:
        for number in range(9):
            app.execute(INSERT, [number % 3, str(number)])
    assert seal_audit_events() == 9
    assert [(head.shard, head.seq) for head in heads.current_heads()] == [(0, 3), (1, 3), (2, 3)]
    assert verify_audit() == AuditReport(True, 9, 3, 0, None)


def test_longer_trails_are_sealed_and_walked_in_pages(trail, monkeypatch):
    monkeypatch.setattr("ledger.audit.sealing.BATCH", 4)
    monkeypatch.setattr("ledger.audit.chain._PAGE", 4)
    record(12)
    assert seal_events() == 12
    assert verify_audit().links == 12


def test_the_sealer_waits_for_open_transactions(trail):
    """Else an event with a lower number could be committed behind a sealed one."""
    with connect(trail) as slow, connect(trail, autocommit=True) as quick:
        first = slow.execute(INSERT, [0, "slow"]).fetchone()
        second = quick.execute(INSERT, [0, "quick"]).fetchone()
        assert seal_events() == 0
        slow.commit()
        assert seal_events() == 2
    sealed = list(AuditSeal.objects.order_by("seq").values_list("event_id"))
    assert sealed == [first, second]
    assert verify_audit().ok


def test_the_lag_is_the_age_of_the_oldest_event_without_a_seal(trail):
    assert audit_lag() is None
    record(2)
    before = audit_lag()
    assert before is not None
    assert before.total_seconds() > 0
    seal_events()
    assert audit_lag() is None
    record(1)
    after = audit_lag()
    assert after is not None
    assert timezone.now() - after > AuditEvent.objects.order_by("id")[1].created_at


def test_an_event_cannot_choose_its_transaction_or_time(trail):
    record(1)
    seal_events()
    with connect(trail) as app:
        app.execute(
            """INSERT INTO audit_events (shard, actor, action, object_type, object_id, request_id, xact_id, created_at)
               VALUES (0, 'a', 'b', 'c', 'd', '', '3', '2001-01-01')"""
        )
    assert seal_events() == 1
    assert AuditEvent.objects.filter(created_at__year=2001).count() == 0
    assert verify_audit().ok


def test_two_links_cannot_follow_the_same_one(trail):
    """A sealer that does not see the other's links, as with a lock that failed."""
    record(2)
    with connect(trail) as blind:
        blind.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        blind.execute("SELECT 1 FROM audit_seal")
        assert seal_events() == 2
        with pytest.raises(errors.UniqueViolation):
            blind.execute("SELECT audit_seal_events(0, 100)")
    assert verify_audit().links == 2


def test_the_application_cannot_seal_by_hand(trail):
    record(1)
    seal_events()
    with connect(trail, autocommit=True) as app:
        for attack in (
            "INSERT INTO audit_seal SELECT * FROM audit_seal",
            "UPDATE audit_seal SET seq = seq",
            "DELETE FROM audit_seal",
            "TRUNCATE audit_seal",
            "SELECT audit_hash_v1('', 1, NULL)",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                app.execute(attack)


# What a superuser does with the triggers off, and what the walk has to say: seq, event, kind.
TAMPERING = {
    "a changed actor": ("UPDATE audit_events SET actor = 'somebody' WHERE id = 4", (4, 4, "event_changed")),
    "a changed field": ("UPDATE audit_events SET after = '{}' WHERE id = 4", (4, 4, "event_changed")),
    "a null made empty": ("UPDATE audit_events SET before = 'null' WHERE id = 5", (5, 5, "event_changed")),
    "another time": (
        "UPDATE audit_events SET created_at = created_at + interval '1 microsecond' WHERE id = 4",
        (4, 4, "event_changed"),
    ),
    "text moved between fields": (
        "UPDATE audit_events SET actor = actor || left(action, 1), action = substr(action, 2) WHERE id = 4",
        (4, 4, "event_changed"),
    ),
    "another shard": ("UPDATE audit_events SET shard = 1 WHERE id = 4", (4, 4, "event_changed")),
    "a deleted event": ("DELETE FROM audit_events WHERE id = 4", (4, 4, "event_missing")),
    "a deleted link": ("DELETE FROM audit_seal WHERE seq = 4", (5, 5, "link_missing")),
    "an event deleted with its link": (
        "WITH e AS (DELETE FROM audit_events WHERE id = 4) DELETE FROM audit_seal WHERE seq = 4",
        (5, 5, "link_missing"),
    ),
    "a gap that was closed": (
        """WITH gone AS (DELETE FROM audit_seal WHERE seq = 4)
           UPDATE audit_seal SET seq = seq + 100 WHERE seq > 4;
           UPDATE audit_seal SET seq = seq - 101 WHERE seq > 100""",
        (4, 5, "link_broken"),
    ),
    "two events that changed places": (
        """UPDATE audit_seal SET event_id = -4 WHERE event_id = 4;
           UPDATE audit_seal SET event_id = 4 WHERE event_id = 5;
           UPDATE audit_seal SET event_id = 5 WHERE event_id = -4""",
        (4, 5, "event_changed"),
    ),
    "two links that changed places": (
        """UPDATE audit_seal SET seq = -4 WHERE seq = 4;
           UPDATE audit_seal SET seq = 4 WHERE seq = 5;
           UPDATE audit_seal SET seq = 5 WHERE seq = -4""",
        (4, 5, "link_broken"),
    ),
    "a truncated tail": (
        "DELETE FROM audit_events WHERE id > 6; DELETE FROM audit_seal WHERE seq > 6",
        (7, None, "truncated"),
    ),
    "everything deleted": ("DELETE FROM audit_events; DELETE FROM audit_seal", (1, None, "truncated")),
    "a link before the first": (
        """INSERT INTO audit_seal (shard, seq, event_id, xact_id, version, prev_hash, hash, sealed_at)
           SELECT shard, 0, -1, '0', 1, '\\x01', prev_hash, sealed_at FROM audit_seal WHERE seq = 1""",
        (0, -1, "link_missing"),
    ),
    "a version nobody knows": ("UPDATE audit_seal SET version = 9 WHERE seq = 4", (4, 4, "unknown_version")),
    "an event slipped in": (
        """INSERT INTO audit_events (id, shard, actor, action, object_type, object_id, request_id, xact_id, created_at)
           SELECT 1000, 0, 'a', 'b', 'c', 'd', '', xact_id, created_at FROM audit_events WHERE id = 4""",
        (None, 1000, "event_unsealed"),
    ),
    # The whole chain made anew, with the very function that seals: only the exported head tells.
    "a rewritten chain": (
        """UPDATE audit_events SET actor = 'somebody' WHERE id = 4;
           DELETE FROM audit_seal; SELECT audit_seal_events(0, 100)""",
        (10, 10, "head_differs"),
    ),
}


@pytest.mark.parametrize("how", TAMPERING)
def test_tampering_is_found_and_named(trail, how):
    record(10)
    assert seal_audit_events() == 10
    attack, (seq, event_id, kind) = TAMPERING[how]
    with connect(trail, SUPERUSER) as evil:
        for table in ("audit_events", "audit_seal"):
            evil.execute(f"ALTER TABLE {table} DISABLE TRIGGER ALL")
        for statement in attack.split(";"):
            evil.execute(statement)
    found = fault()
    assert (found.shard, found.seq, found.event_id, found.kind) == (0, seq, event_id, kind)
    out = StringIO()
    with pytest.raises(SystemExit) as caught:
        call_command("audit_verify", "--json", stdout=out)
    assert caught.value.code == 1
    assert json.loads(out.getvalue())["fault"]["kind"] == kind
    out = StringIO()
    with pytest.raises(SystemExit):
        call_command("audit_verify", stdout=out)
    assert kind in out.getvalue()


def test_a_head_that_was_not_written_is_written_the_next_time(trail, caplog):
    """The sealer died after its commit, before the export."""
    record(3)
    seal_events()
    with caplog.at_level("INFO", "ledger.audit"):
        assert seal_audit_events() == 0
    [head] = heads.current_heads()
    assert set(heads.exported_heads()) == {head}
    assert f"audit head shard=0 seq=3 hash={head.hash}" in caplog.text


def test_a_head_that_was_cut_short_by_a_crash_does_not_stop_the_walk(trail):
    record(3)
    seal_audit_events()
    [log] = heads.heads_folder().glob("heads-*.jsonl")
    log.write_text(log.read_text() + '{"shard": 0, "se')
    record(3)
    seal_audit_events()
    assert verify_audit() == AuditReport(True, 6, 2, 0, None)


def test_writers_and_sealers_at_once_never_fork(trail):
    """Transactions of many lengths, some taken back, while four sealers run."""
    stop = threading.Event()

    def write(writer: int) -> None:
        with connect(trail) as app:
            for number in range(60):
                for leg in range(1 + number % 3):
                    app.execute(INSERT, [writer % 2, f"{writer} {number} {leg}"])
                app.rollback() if number % 7 == 0 else app.commit()

    def seal() -> int:
        sealed = 0
        with connect(trail, autocommit=True) as app:
            while not stop.is_set():
                for shard in (0, 1):
                    sealed += app.execute("SELECT audit_seal_events(%s, 10)", [shard]).fetchone()[0]
        return sealed

    with ThreadPoolExecutor(12) as pool:
        sealers = [pool.submit(seal) for _ in range(4)]
        for writer in [pool.submit(write, number) for number in range(8)]:
            writer.result()
        stop.set()
        sealed = sum(sealer.result() for sealer in sealers)
    assert sealed + seal_events() == AuditEvent.objects.count() == AuditSeal.objects.count()
    report = verify_audit()
    assert (report.ok, report.links, report.unsealed) == (True, AuditSeal.objects.count(), 0)


SEALER = "from ledger.tasks import seal_audit_events\nwhile True: print(seal_audit_events(), flush=True)"


@pytest.fixture
def killed_sealers(trail, tmp_path) -> Iterator[list[int]]:
    """Starts sealers as processes and kills each with -9 in its work; yields how many were killed."""
    killed: list[int] = []
    environ = {**os.environ, "DATABASE_URL": database_url(trail), "APEX_VAR_DIR": str(tmp_path)}
    environ["DIRECT_URL"] = environ["DATABASE_URL"]
    manage = Path(__file__).parents[2] / "manage.py"

    def kill_some() -> None:
        for number in range(3):
            sealer = subprocess.Popen(
                [sys.executable, str(manage), "shell", "--no-imports", "-c", SEALER],
                env=environ, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert sealer.stdout is not None
            for _ in range(2 + 5 * number):
                sealer.stdout.readline()
            sealer.send_signal(signal.SIGKILL)
            sealer.wait(10)
            sealer.stdout.close()
            killed.append(sealer.returncode)

    thread = threading.Thread(target=kill_some)
    thread.start()
    yield killed
    thread.join(30)


def test_kill_9_of_the_sealer_leaves_a_chain_that_holds(trail, killed_sealers):
    deadline = time.monotonic() + 60
    written = 0
    with connect(trail, autocommit=True) as app:
        while len(killed_sealers) < 3:
            assert time.monotonic() < deadline
            app.execute(INSERT, [written % 2, str(written)])
            written += 1
    assert killed_sealers == [-signal.SIGKILL] * 3
    seal_audit_events()
    report = verify_audit()
    assert (report.ok, report.links, report.unsealed) == (True, written, 0)
    assert report.heads > 1
