"""Real vLLM servers on the CPU, and the ways in which they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Two at once on two cores, beside whatever else runs there.
START_S = 300.0


@dataclass
class VllmServer:
    """One node. `start` does not wait, so that several can come up at once."""

    name: str
    python: Path  # of the environment that has vLLM
    model: Path
    log: Path
    extra: tuple[str, ...] = ()
    port: int = 0
    epoch: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.port = listening.getsockname()[1]
        self.epoch += 1
        command = [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port),
            # Eager: compiling takes longer than all the tokens of the tests.
            "--dtype", "float32", "--enforce-eager", *self.extra,
        ]  # fmt: skip
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        # One thread each and no binding: the servers share two cores with each other.
        shared = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | quiet | shared,
                cwd=self.log.parent,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.is_healthy:
            assert self._process is not None
            assert self._process.poll() is None, f"{self.name} ended:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"{self.name} is not up:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)

    @property
    def is_healthy(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def vanish(self) -> None:
        """As when the machine is taken away: everything of it ends at once."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """The polite signal to the server; what happens then is up to --shutdown-timeout."""
        assert self._process is not None
        self._process.terminate()

    def kill_engine_core(self) -> None:
        """Only the process that computes: the HTTP server lives on and has to report it."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        (core,) = (child for child in children if "EngineCore" in child.name() + " ".join(child.cmdline()))
        core.kill()

    def clear_away(self) -> None:
        """Whatever is left of it; the port is free afterwards."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        self._process = None
