"""Other ways to tell a door that a node leaves: HAProxy's runtime API, and a Celery task."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from celery import Celery

from bench.support.doors import free_port
from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.kernel.pins import NodeMaps
from kernel_steer.measure.backend import NODES
from kernel_steer.measure.machine import Part

_CONFIG = """
global
  maxconn 8192
  nbthread 1
  stats socket {folder}/api mode 600 level admin
  stats timeout 1h
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend door
  bind 127.0.0.1:{port}
  default_backend nodes
backend nodes
  server a 127.0.0.1:{a}
  server b 127.0.0.1:{b} backup
"""
_TASK = "bench.flip"


class HAProxy:
    """In front of two nodes, the second as backup, switched over a connection to its runtime API that stays open."""

    def __init__(self, backend_ports: Sequence[int]) -> None:
        """Raises FileNotFoundError when it is not installed."""
        if shutil.which("haproxy") is None:
            raise FileNotFoundError("haproxy is not installed (apt-get install haproxy)")
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="apex-bench-"))
        config = self._folder / "config"
        a, b = backend_ports
        config.write_text(_CONFIG.format(folder=self._folder, port=self.port, a=a, b=b))
        self._process = subprocess.Popen(
            ["haproxy", "-f", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._api = self._connect()
        self._say(b"prompt")

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + 10
        while True:
            api = socket.socket(socket.AF_UNIX)
            try:
                api.connect(str(self._folder / "api"))
            except OSError:
                api.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return api

    def _say(self, command: bytes) -> None:
        self._api.sendall(command + b"\n")
        answer = b""
        while not answer.endswith(b"> "):
            answer += self._api.recv(4096)
        if answer.strip() not in {b">"}:
            raise RuntimeError(f"HAProxy refuses {command!r}: {answer!r}")

    def leave(self) -> int:
        """See Way."""
        began_ns = time.monotonic_ns()
        self._say(b"set server nodes/a state maint")
        return began_ns

    def come_back(self) -> None:
        """See Way."""
        self._say(b"set server nodes/a state ready")

    def stop(self) -> None:
        self._api.close()
        self._process.terminate()
        self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


class CeleryTask:
    """A task in a real worker makes the flip, in the map of a kernel engine."""

    def __init__(self, context: Any, broker_url: str, pins: str) -> None:
        self._app = _make_app(broker_url)
        self._worker = Part(context, _run_worker, broker_url, pins)

    def leave(self) -> int:
        """See Way."""
        began_ns = time.monotonic_ns()
        self._app.send_task(_TASK, args=[True])
        return began_ns

    def come_back(self) -> None:
        """See Way."""
        self._app.send_task(_TASK, args=[False])

    def stop(self) -> None:
        self._worker.end()
        self._app.close()


def _make_app(url: str) -> Celery:
    app = Celery("bench", broker=url.replace("unix://", "redis+socket://"), set_as_current=False)
    app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=1, task_acks_late=True)
    return app


def _run_worker(pipe: Connection, url: str, pins: str) -> None:
    with open(os.devnull, "w") as nowhere:  # stdout is for the figures
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    maps, node = NodeMaps(), NodeKey(NODES[0], 0)
    maps.refresh({pins})
    app = _make_app(url)

    @app.task(name=_TASK)
    def flip(leaves: bool) -> None:
        if leaves:
            maps.flip(node)
        else:
            maps.take_back(node)

    def say_ready() -> None:
        with suppress(Exception):
            while not app.control.ping(timeout=0.5):
                pass
        pipe.send("ready")

    threading.Thread(target=say_ready, daemon=True).start()
    app.worker_main(["-q", "worker", "-P", "solo", "--without-gossip", "--without-mingle", "-l", "ERROR"])
