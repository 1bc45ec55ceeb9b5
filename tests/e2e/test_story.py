"""The whole platform on a real model: the demo's story, and a second one in which our own processes die.

Runs in a folder of its own, beside whatever else runs on the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import psutil
import psycopg
import pytest

from apex.demo.clients import TOPICS, Customer, Stream
from apex.demo.purchase import buy_credits
from apex.local.paths import BASE_DIR
from apex.local.postgres import SUPERUSER, EmbeddedPostgres
from apex.local.stack import Stack, model_is_installed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.skipif(
        not model_is_installed(), reason="requirements-demo.txt (the language model) is not installed"
    ),
]
T = TypeVar("T")
_OF_THE_TEST_RUN = {
    "DATABASE_URL",
    "DIRECT_URL",
    "REDIS_URL",
    "SECRET_KEY",
    "ALLOWED_HOSTS",
    "APEX_TESTING",
    "PAYPAL_MODE",
}


@pytest.fixture
def home():
    folder = Path(tempfile.mkdtemp(prefix="apex-e2e-"))
    folder.chmod(0o711)  # PostgreSQL runs as another user when root starts it
    models = BASE_DIR / "var" / "models"
    if models.is_dir():
        (folder / "var").mkdir()
        (folder / "var").chmod(0o711)
        shutil.copytree(models, folder / "var" / "models")  # assembling it again takes seconds
    yield folder / "var"
    left = [p for p in psutil.process_iter() if _belongs_to(p, str(folder))]
    for process in left:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"left behind: {left}"


def _belongs_to(process: psutil.Process, folder: str) -> bool:
    try:
        return process.pid != os.getpid() and (
            any(folder in word for word in process.cmdline())
            or folder in process.environ().get("APEX_VAR_DIR", "")
        )
    except (psutil.Error, OSError):
        return False


def environ(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_TEST_RUN}
    return kept | {"APEX_VAR_DIR": str(home), "DJANGO_SETTINGS_MODULE": "apex.settings"}


def manage(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=BASE_DIR,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_demo_keeps_every_promise(home):
    done = manage(environ(home), "demo", "--once")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads((home / "demo-report.json").read_text())
    assert report["streams"] == 8
    assert report["evictions"] == 1
    assert report["answers_resumed"] == 8
    assert (report["client_resets"], report["tokens_lost"], report["tokens_duplicated"]) == (0, 0, 0)
    assert report["delivered_tokens"] == report["charged_tokens"] > 0
    assert report["ledger_ok"] is True
    assert report["resume_gap_ms"]["p50"] > 0
    assert report["reroute_ms"]["p50"] > 0
    verified = manage(environ(home), "ledger_verify", "--json")
    assert verified.returncode == 0, verified.stdout
    assert json.loads(verified.stdout)["ok"] is True


def test_the_books_survive_the_death_of_gateway_worker_and_postgresql(home):
    with Stack(environ=environ(home), console=None) as stack:
        pilot = json.loads(manage(stack.environ, "seed_demo", "--json").stdout)["pilot"]
        buy_credits(web=stack.web_url, api_key=pilot["api_key"], amount="10.00")
        streams = asyncio.run(_deaths(stack, pilot["api_key"]))
        with psycopg.connect(EmbeddedPostgres.at(home).url(SUPERUSER), autocommit=True) as database:
            usage = _wait_for(lambda: _charged(database, streams))
            open_holds = database.execute("SELECT count(*) FROM ledger_hold WHERE state = 'open'").fetchone()
        assert open_holds == (0,)
        verified = manage(stack.environ, "ledger_verify", "--json")
        assert verified.returncode == 0, verified.stdout
    delivered = {stream.request_id: len(stream.ids) for stream in streams}
    assert {request: tokens for request, (tokens, _, _) in usage.items()} == delivered
    outcomes = [outcome for _, outcome, _ in usage.values()]
    assert outcomes.count("recovered") == 4
    assert outcomes.count("completed") == 4
    assert all(amount > 0 for _, _, amount in usage.values())


async def _deaths(stack: Stack, api_key: str) -> list[Stream]:
    """Four answers lose their gateway, four others run while worker and database are killed."""

    def customer() -> Customer:
        return Customer(base_url=f"{stack.gateway_url}/v1", api_key=api_key, model="gemma-3-270m", tokens=120)

    first, second = customer(), customer()
    cut = [Stream(number, TOPICS[number]) for number in range(4)]
    answering = asyncio.create_task(first.stream_all(cut))
    while not all(len(stream.ids) >= 20 for stream in cut):
        assert not answering.done(), [stream.error for stream in cut]
        await asyncio.sleep(0.01)
    await asyncio.to_thread(stack.process("gateway").kill)
    await answering
    assert all(stream.reset for stream in cut), "a killed gateway cannot hide it"
    await asyncio.to_thread(stack.process("gateway").wait_ready)
    whole = [Stream(number, TOPICS[number]) for number in range(4, 8)]
    answering = asyncio.create_task(second.stream_all(whole))
    while not all(len(stream.ids) >= 20 for stream in whole):
        assert not answering.done(), [stream.error for stream in whole]
        await asyncio.sleep(0.01)
    await asyncio.to_thread(stack.process("worker").kill)
    await asyncio.to_thread(stack.process("postgres").kill)
    await answering
    assert [len(stream.ids) for stream in whole] == [120] * 4, [stream.error for stream in whole]
    await asyncio.to_thread(stack.process("postgres").wait_ready)
    await asyncio.to_thread(stack.process("worker").wait_ready)
    await first.close()
    await second.close()
    return cut + whole


def _charged(
    database: psycopg.Connection, streams: list[Stream]
) -> dict[str, tuple[int, str, Decimal]] | None:
    rows = database.execute(
        "SELECT request_id::text, completion_tokens, outcome, amount FROM usage_event"
        " WHERE request_id = ANY (%s::uuid[]) AND charged_at IS NOT NULL",
        [[stream.request_id for stream in streams]],
    ).fetchall()
    return {row[0]: row[1:] for row in rows} if len(rows) == len(streams) else None


def _wait_for(look: Callable[[], T | None], timeout_s: float = 60) -> T:
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.1)
    return found
