"""A var folder of its own for tests that run the embedded servers as a checkout does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apex.local.postgres import EmbeddedPostgres
from apex.local.valkey import EmbeddedValkey


@contextmanager
def var_folder() -> Iterator[Path]:
    """Like the one of a checkout: other users may pass, for PostgreSQL may run as one of them."""
    folder = Path(tempfile.mkdtemp(prefix="apex-var-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        EmbeddedPostgres.at(folder).stop()
        EmbeddedValkey.at(folder).stop()
        shutil.rmtree(folder)


def bare_environment(var: Path, **more: str) -> dict[str, str]:
    """What a newcomer's shell holds: no server named by anybody."""
    return {"PATH": os.environ["PATH"], "APEX_VAR_DIR": str(var), **more}
