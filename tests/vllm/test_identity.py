"""What a node worker finds out about a real vLLM server."""

from __future__ import annotations

from pathlib import Path

from kernel_steer.node.identity import Engine, identify
from kernel_steer.node.models import file_sha256
from tests.vllm.pool import Pool


def test_two_servers_of_one_model_have_one_identity(pool: Pool, tiny_model: Path) -> None:
    first, second = (identify(Engine("127.0.0.1", server.port), model="tiny") for server in pool.servers)
    assert first == second
    assert first.engine.startswith("vllm 0.32")
    assert first.tokenizer_id == file_sha256(tiny_model / "tokenizer.json")
    assert len(first.revision) == len(first.template_id) == 64
