"""Engines carry answers. `select_engine` picks one and says why."""

from __future__ import annotations

from typing import NamedTuple

from kernel_steer.engine.base import Engine
from kernel_steer.engine.relay import RelayEngine


class EngineChoice(NamedTuple):
    engine: Engine
    reason: str


class EngineUnavailable(RuntimeError):
    """The engine that was asked for by name cannot run here."""


def select_engine(wanted: str) -> EngineChoice:
    """`wanted` is auto, kernel or relay. Only `auto` falls back. Raises EngineUnavailable."""
    missing = "the kernel engine is not part of this version"
    if wanted == "kernel":
        raise EngineUnavailable(missing)
    return EngineChoice(RelayEngine(), "asked for" if wanted == "relay" else missing)
