"""LiteLLM's proxy in its own environment (.venv-litellm, `bin/setup litellm`), without a database."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil

from bench.support.doors import free_port

HOME = Path(__file__).resolve().parents[2] / ".venv-litellm"
_START_S = 120.0


class LiteLLM:
    """`upstreams` maps a model name to the port of the node that serves it. Raises FileNotFoundError."""

    def __init__(self, upstreams: Mapping[str, int]) -> None:
        program = HOME / "bin" / "litellm"
        if not program.exists():
            raise FileNotFoundError("not installed (bin/setup litellm)")
        self.port = free_port()
        self.key = "sk-" + secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="apex-bench-"))
        config = self._folder / "config.json"  # YAML contains JSON
        config.write_text(json.dumps(_config(upstreams)))
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(self.port)],
            env=_without_database()
            | {
                "LITELLM_MASTER_KEY": self.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits for the network
                "LITELLM_LOG": "ERROR",
                "LITELLM_MODE": "PRODUCTION",
            },
            cwd=self._folder,
            stdout=self._log,
            stderr=self._log,
        )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/liveliness", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = (self._folder / "log").read_text(errors="replace")[-2000:]
                    self.stop()
                    raise RuntimeError(f"LiteLLM did not start:\n{log}") from None
                time.sleep(0.2)

    def cpu_s(self) -> float:
        root = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
        return sum(one.user + one.system for one in times)

    def rss_bytes(self) -> int:
        root = psutil.Process(self._process.pid)
        return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _without_database() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}


def _config(upstreams: Mapping[str, int]) -> dict[str, object]:
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": "openai/double",
                "api_base": f"http://127.0.0.1:{port}/v1",
                "api_key": "none",
            },
        }
        for name, port in upstreams.items()
    ]
    return {"model_list": models, "litellm_settings": {"telemetry": False, "set_verbose": False}}


def version() -> str:
    (found,) = (HOME / "lib").glob("python*/site-packages/litellm-*.dist-info")
    return found.name.removeprefix("litellm-").removesuffix(".dist-info")
