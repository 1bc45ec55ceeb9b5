"""Which weights a node has loaded, told without reading them all: a hundred gigabytes take minutes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def revision_of(model: Path) -> str:
    """The commit of a snapshot in the hub's cache; of other folders or files a digest of their configuration and
    of samples of the weights. Two nodes that read the same files say the same, whatever these are called."""
    if model.parent.name == "snapshots" and _COMMIT.fullmatch(model.name):
        return model.name
    files = [model] if model.is_file() else [path for kind in _WEIGHTS for path in model.glob(kind)]
    digests = sorted(_digest(path) for path in files)
    config = model / "config.json"
    if config.is_file():
        digests.append(config.read_bytes())
    return hashlib.sha256(b"\0".join(digests)).hexdigest()


def _digest(path: Path) -> bytes:
    """Of the size and of blocks at even distances, the first and the last included."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "big"))
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
