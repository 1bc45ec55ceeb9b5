"""Ways from a client to a node: direct, our gateway with either engine, nginx, HAProxy."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.support.processes import Part
from kernel_steer.engine import select_engine
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.server import Connections, listen
from kernel_steer.journal import Journal
from kernel_steer.resume.tokens import TokenizerStore
from kernel_steer.resume.work import Services
from tests.kernel_steer.engine_double import EngineDouble
from tests.kernel_steer.harness import AdmissionDouble


def run_gateway(pipe: Any, node_port: int, engine: str) -> None:
    """Our gateway in front of one node, with a business in memory. Target of a `Part`."""

    async def main() -> None:
        choice = select_engine(engine)
        folder = Path(tempfile.mkdtemp(prefix="apex-bench-"))
        admission = AdmissionDouble([EngineDouble("a", port=node_port)])
        services = Services(admission, choice.engine, TokenizerStore(folder))
        gateway = Gateway(services, Journal(folder / "journal"), choice)
        listener = listen("127.0.0.1", 0)
        pipe.send(listener.getsockname()[1])
        await Connections(gateway, listener).accept()

    uvloop.run(main())


class Proxy:
    """nginx or HAProxy from the system, in front of one node."""

    def __init__(self, name: str, node_port: int) -> None:
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="apex-bench-"))
        config = self._folder / "config"
        config.write_text(_CONFIGS[name].format(port=self.port, node=node_port, folder=self._folder))
        argv = (
            [name, "-g", "daemon off;", "-c", str(config)] if name == "nginx" else [name, "-f", str(config)]
        )
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for(self.port)

    def cpu_s(self) -> float:
        root = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
        return sum(one.user + one.system for one in times)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


def open_door(name: str, node_port: int) -> Part | Proxy:
    """Raises FileNotFoundError for a proxy that is not installed, EngineUnavailable for an engine that cannot run."""
    if name in ("relay", "kernel"):
        if name == "kernel":
            select_engine("kernel").engine.close()  # says why it cannot run before a process is made
        return Part(run_gateway, node_port, name)
    if shutil.which(name) is None:
        raise FileNotFoundError(f"{name} is not installed")
    return Proxy(name, node_port)


_CONFIGS = {
    "nginx": """
worker_processes 1; pid {folder}/pid; error_log /dev/null;
events {{ worker_connections 4096; }}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://127.0.0.1:{node}; proxy_http_version 1.1; proxy_buffering off; proxy_read_timeout 60s; }} }} }}
""",
    "haproxy": """
global
  maxconn 8192
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
listen door
  bind 127.0.0.1:{port}
  server node 127.0.0.1:{node}
""",
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            os.sched_yield()
        else:
            return
