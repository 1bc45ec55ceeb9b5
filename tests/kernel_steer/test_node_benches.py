"""The scripts of bench/ that stand on our doubles still run, and say what they promise to say."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from apex.local.paths import BASE_DIR


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BASE_DIR / "bench" / script), "--engine", "relay", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_a_killed_node_is_measured() -> None:
    said = run("resume_gap.py", "--rounds", "2")
    assert all(said[name]["p50"] > 0 for name in ("detection_ms", "resume_ms", "gap_ms"))


def test_the_gateway_is_measured_where_litellm_is_not_wanted() -> None:
    said = run(
        "gateway_vs_litellm.py",
        *("--rounds", "1", "--seconds", "0.2", "--turns", "2", "--idle-streams", "5", "--without-litellm"),
    )
    assert said["skipped"] == {"litellm": "not wanted"}
    assert said["gateway"]["answers_per_s"] > 0
    assert said["gateway"]["streams_per_s"] > 0
    assert said["gateway_kb_per_idle_stream"] >= 0
