"""What is missing for the kernel engine, in words that say what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kernel_steer.engine.kernel import bpf, pins
from kernel_steer.engine.kernel.compile import CannotCompile, get_bytecode

_KERNEL_MIN = (5, 15)
_SYS_ADMIN = 21
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_PERFMON": 38, "CAP_BPF": 39}


def probe() -> str | None:
    """None when the engine can be loaded here, else the first reason why not. May compile (seconds, once)."""
    if sys.platform != "linux" or not bpf.supported() or sys.byteorder != "little":
        return "it needs Linux on x86_64 or aarch64"
    release = os.uname().release
    if _version(release) < _KERNEL_MIN:
        return f"it needs Linux {'.'.join(map(str, _KERNEL_MIN))} or newer, this is {release}"
    if missing := _missing_capabilities():
        return f"it needs {', '.join(_CAPABILITIES)}; missing: {', '.join(missing)}"
    try:
        pins.ensure_bpffs()
        get_bytecode()
    except (pins.PinsUnavailable, CannotCompile) as error:
        return str(error)
    return None


def _version(release: str) -> tuple[int, ...]:
    numbers = []
    for part in release.split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)


def _missing_capabilities() -> list[str]:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            implied = {"CAP_PERFMON", "CAP_BPF"} if effective >> _SYS_ADMIN & 1 else set()
            return [
                name
                for name, bit in _CAPABILITIES.items()
                if not effective >> bit & 1 and name not in implied
            ]
    return list(_CAPABILITIES)
