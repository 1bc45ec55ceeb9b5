"""Where a checkout keeps its running state. APEX_VAR_DIR moves all of it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parents[2]

# sun_path holds 108 bytes; the longest name we append is ".s.PGSQL.5432.lock".
_SOCKET_DIR_LIMIT = 85


def var_dir() -> Path:
    return Path(os.environ.get("APEX_VAR_DIR", "") or BASE_DIR / "var").resolve()


def socket_dir(name: str, var: Path | None = None) -> Path:
    """A folder for unix sockets: under var/run, or a short one in /tmp where that path is too long."""
    wanted = (var or var_dir()) / "run" / name
    if len(os.fsencode(wanted)) <= _SOCKET_DIR_LIMIT:
        return wanted
    digest = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"apex-{os.getuid()}-{digest}"
