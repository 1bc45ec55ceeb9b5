"""Our ledger beside django-hordak 2.0 and pgledger, in turns on one embedded PostgreSQL that syncs to the disk.

Prints one JSON object: postings per second (median of the rounds) and the ratios of the same round, which
are what counts on a shared machine. hordak comes from PyPI into a virtual environment of its own under
var/bench; where that cannot be had it says why and our figures stand alone. pgledger is measured when its SQL
is given: --pgledger with its files in order (pgsql-ulid, pgledger.sql), or their paths in APEX_PGLEDGER_SQL.
`million` is what reading costs in books of a million entries.

    bench/ledger.py [--rounds 3] [--seconds 3] [--clients 8] [--pgledger FILE ...] [--million]
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apex.local.paths import var_dir
from apex.local.postgres import APP_ROLE, OWNER_ROLE, SUPERUSER, EmbeddedPostgres

HORDAK = ("django-hordak==2.0.0", "Django==5.2.19", "psycopg[binary]==3.3.9")
BOTH = ("single", "hot", "batch100")
_SUPPORT = Path(__file__).parent / "support"


class Unavailable(Exception):
    """A peer cannot be measured here; the message says why."""


class Peer(Protocol):
    """Another ledger under the same load: {"per_s", "p99_ms"} of a phase of BOTH."""

    def run(self, phase: str, seconds: float) -> dict[str, float]: ...


def _load(argv: list[str], name: str) -> str:
    result = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=300)
    if result.returncode != 0:
        raise Unavailable(f"{name} failed: {result.stderr.strip().splitlines()[-1:]}")
    return result.stdout


class Pgledger:
    def __init__(self, server: EmbeddedPostgres, clients: int, files: list[Path]) -> None:
        if missing := [str(file) for file in files if not file.is_file()]:
            raise Unavailable(f"pgledger's SQL is not there: {', '.join(missing)}")
        if not files:
            raise Unavailable("pgledger's SQL was not given: --pgledger or APEX_PGLEDGER_SQL")
        self._url, self._clients = server.url(OWNER_ROLE, "pgledger"), clients
        _create_database(server, "pgledger")
        self._run("prepare", *map(str, files))

    def run(self, phase: str, seconds: float) -> dict[str, float]:
        return json.loads(self._run(phase, str(seconds), str(self._clients)))

    def _run(self, *arguments: str) -> str:
        return _load([sys.executable, str(_SUPPORT / "pgledger_load.py"), self._url, *arguments], "pgledger")


class Hordak:
    def __init__(self, server: EmbeddedPostgres, clients: int) -> None:
        self._python = _hordak_environment()
        self._server, self._clients = server, clients
        _create_database(server, "hordak")
        self._run("prepare")

    def run(self, phase: str, seconds: float) -> dict[str, float]:
        return json.loads(self._run(phase, str(seconds), str(self._clients)))

    def _run(self, *arguments: str) -> str:
        load = str(_SUPPORT / "hordak_load.py")
        return _load(
            [str(self._python), load, "hordak", str(self._server.sockets), OWNER_ROLE, *arguments], "hordak"
        )


def _create_database(server: EmbeddedPostgres, name: str) -> None:
    import psycopg

    with psycopg.connect(server.url(SUPERUSER, "postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} OWNER {OWNER_ROLE}")


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
    paths = [Path(path) for path in os.environ.get("APEX_PGLEDGER_SQL", "").split(os.pathsep) if path]
    parser.add_argument("--pgledger", type=Path, nargs="+", default=paths, metavar="FILE")
    parser.add_argument("--million", action="store_true", help="also read from books of a million entries")
    given = parser.parse_args()
    with own_server() as server:
        import django

        django.setup()
        answer = compare(server, given)
        if given.million:
            from support.million import read_a_million

            answer["million"] = read_a_million()
        print(json.dumps(answer))


def _peers(server: EmbeddedPostgres, given: argparse.Namespace, answer: dict[str, object]) -> dict[str, Peer]:
    """Those that can be measured here; why the others cannot goes into the answer."""
    makers: dict[str, Callable[[], Peer]] = {
        "hordak": lambda: Hordak(server, given.clients),
        "pgledger": lambda: Pgledger(server, given.clients, given.pgledger),
    }
    peers = {}
    for name, make in makers.items():
        try:
            peers[name] = make()
        except Unavailable as reason:
            answer[f"{name}_skipped"] = str(reason)
    return peers


def compare(server: EmbeddedPostgres, given: argparse.Namespace) -> dict[str, object]:
    from ledger.bench import PHASES, Bench, throw_away_database

    answer: dict[str, object] = {
        "bench": "ledger", "rounds": given.rounds, "seconds": given.seconds, "clients": given.clients,
    }  # fmt: skip
    peers = _peers(server, given, answer)
    ours: dict[str, list] = {phase: [] for phase in PHASES}
    theirs: dict[str, dict[str, list]] = {name: {phase: [] for phase in BOTH} for name in peers}
    with throw_away_database() as url, Bench(url, given.clients) as bench:
        for _ in range(given.rounds):
            for phase in PHASES:
                ours[phase].append(bench.run(phase, given.seconds))
                for name, peer in peers.items() if phase in BOTH else ():
                    theirs[name][phase].append(peer.run(phase, given.seconds))
        bench.check()
    answer["apex"] = {
        phase: {
            "per_s": round(statistics.median(one.per_s for one in figures), 1),
            "p99_ms": round(statistics.median(one.p99_ms for one in figures), 2),
        }
        for phase, figures in ours.items()
    }
    for name, measured in theirs.items():
        answer[name] = {
            phase: {
                what: round(statistics.median(one[what] for one in figures), 2)
                for what in ("per_s", "p99_ms")
            }
            for phase, figures in measured.items()
        }
        answer[f"times_{name}"] = {
            phase: [round(a.per_s / b["per_s"], 2) for a, b in zip(ours[phase], measured[phase], strict=True)]
            for phase in BOTH
        }
    return answer


if __name__ == "__main__":
    main()
