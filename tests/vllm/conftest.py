"""Two real vLLM servers behind the real gateway. Needs `make test-vllm`: an environment of several gigabytes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.pool import Pool
from tests.vllm.servers import VllmServer

HERE = Path(__file__).parent
# Set by `make test-vllm`. Empty where the environment could not be installed.
_PYTHON = os.environ.get("APEX_VLLM_PYTHON", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _PYTHON:
        return
    reason = "needs vLLM in an environment of its own: run `make test-vllm`"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    subprocess.run([_PYTHON, str(HERE / "tiny_model.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    """The first is the one that the tests kill; the second one goes on with what it began."""
    logs = tmp_path_factory.mktemp("vllm")
    made = [VllmServer(name, Path(_PYTHON), tiny_model, logs / f"{name}.log") for name in ("a", "b")]
    try:
        yield made
    finally:
        with ThreadPoolExecutor() as at_once:
            list(at_once.map(VllmServer.clear_away, made))


@pytest.fixture
def pool(servers: list[VllmServer], tiny_model: Path, tmp_path: Path) -> Iterator[Pool]:
    """Both servers up, whatever the test before has done to them, and a fresh gateway in front."""
    for server in servers:
        if not server.is_healthy:
            server.clear_away()
            server.extra = ()
            server.start()
    for server in servers:
        server.wait_healthy()
    with Pool.of(servers, tiny_model, tmp_path) as pool:
        yield pool
