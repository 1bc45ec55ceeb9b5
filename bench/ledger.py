"""Our ledger beside django-hordak 2.0, in turns on one embedded PostgreSQL that syncs to the disk.

Prints one JSON object: postings per second (median of the rounds) and the ratios of the same round, which
are what counts on a shared machine. hordak comes from PyPI into a virtual environment of its own under
var/bench; where that cannot be had it says why and our figures stand alone.

    bench/ledger.py [--rounds 3] [--seconds 3] [--clients 8]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apex.local.paths import var_dir
from apex.local.postgres import APP_ROLE, OWNER_ROLE, SUPERUSER, EmbeddedPostgres

HORDAK = ("django-hordak==2.0.0", "Django==5.2.19", "psycopg[binary]==3.3.9")
BOTH = ("single", "hot", "batch100")
_LOAD = Path(__file__).parent / "support" / "hordak_load.py"


class Unavailable(Exception):
    """hordak cannot be measured here; the message says why."""


class Hordak:
    def __init__(self, server: EmbeddedPostgres, clients: int) -> None:
        self._python = _hordak_environment()
        self._server, self._clients = server, clients
        import psycopg

        with psycopg.connect(server.url(SUPERUSER, "postgres"), autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE hordak OWNER {OWNER_ROLE}")
        self._run("prepare")

    def run(self, phase: str, seconds: float) -> dict[str, float]:
        return json.loads(self._run(phase, str(seconds), str(self._clients)))

    def _run(self, *arguments: str) -> str:
        argv = [str(self._python), str(_LOAD), "hordak", str(self._server.sockets), OWNER_ROLE, *arguments]
        result = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=300)
        if result.returncode != 0:
            raise Unavailable(f"hordak failed: {result.stderr.strip().splitlines()[-1:]}")
        return result.stdout


def _hordak_environment() -> Path:
    """The interpreter of an environment that has hordak, made when there is none."""
    folder = var_dir() / "bench" / "hordak-2.0.0"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        made = subprocess.run(
            [sys.executable, "-m", "venv", str(folder)], check=False, capture_output=True, text=True
        )
        if made.returncode != 0:
            raise Unavailable("no virtual environment for hordak can be made here")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "15", *HORDAK]
        got = subprocess.run(pip, check=False, capture_output=True, text=True)
        if got.returncode != 0:
            raise Unavailable(f"hordak cannot be had from PyPI: {got.stderr.strip().splitlines()[-1:]}")
        (folder / "complete").touch()
    return python


@contextmanager
def own_server() -> Iterator[EmbeddedPostgres]:
    """A durable PostgreSQL of the bench's own, which the settings name from here on."""
    with tempfile.TemporaryDirectory(prefix="apex-bench-") as folder:
        home = Path(folder)
        home.chmod(0o711)
        server = EmbeddedPostgres(data=home / "pg", sockets=home / "s", durable=True)
        process = server.spawn(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            server.wait_ready(process)
            server.provision()
            os.environ.update(
                DATABASE_URL=server.url(APP_ROLE),
                DIRECT_URL=server.url(OWNER_ROLE),
                REDIS_URL="redis://127.0.0.1:1",
                SECRET_KEY="only-for-this-benchmark-" * 2,
                ALLOWED_HOSTS="localhost",
                PAYPAL_MODE="stub",
                DJANGO_SETTINGS_MODULE="apex.settings",
            )
            yield server
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    with own_server() as server:
        import django

        django.setup()
        print(json.dumps(compare(server, given.rounds, given.seconds, given.clients)))


def compare(server: EmbeddedPostgres, rounds: int, seconds: float, clients: int) -> dict[str, object]:
    from ledger.bench import PHASES, Bench, throw_away_database

    answer: dict[str, object] = {"bench": "ledger", "rounds": rounds, "seconds": seconds, "clients": clients}
    try:
        hordak = Hordak(server, clients)
    except Unavailable as reason:
        hordak = None
        answer["hordak_skipped"] = str(reason)
    ours: dict[str, list] = {phase: [] for phase in PHASES}
    theirs: dict[str, list] = {phase: [] for phase in BOTH}
    with throw_away_database() as url, Bench(url, clients) as bench:
        for _ in range(rounds):
            for phase in PHASES:
                ours[phase].append(bench.run(phase, seconds))
                if hordak is not None and phase in theirs:
                    theirs[phase].append(hordak.run(phase, seconds))
        bench.check()
    answer["apex"] = {
        phase: {
            "per_s": round(statistics.median(one.per_s for one in figures), 1),
            "p99_ms": round(statistics.median(one.p99_ms for one in figures), 2),
        }
        for phase, figures in ours.items()
    }
    if hordak is not None:
        answer["hordak"] = {
            phase: {
                name: round(statistics.median(one[name] for one in figures), 2)
                for name in ("per_s", "p99_ms")
            }
            for phase, figures in theirs.items()
        }
        answer["times_hordak"] = {
            phase: [round(a.per_s / b["per_s"], 2) for a, b in zip(ours[phase], theirs[phase], strict=True)]
            for phase in BOTH
        }
    return answer


if __name__ == "__main__":
    main()
