"""Engines carry answers. `select_engine` picks one and says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernel_steer.engine.base import Engine
from kernel_steer.engine.relay import RelayEngine

if TYPE_CHECKING:
    from kernel_steer.journal import Slot


class EngineChoice(NamedTuple):
    engine: Engine
    reason: str


class EngineUnavailable(RuntimeError):
    """The engine that was asked for by name cannot run here."""


def select_engine(wanted: str, *, flows_max: int = 1024) -> EngineChoice:
    """`wanted` is auto, kernel or relay. Only `auto` falls back. Raises EngineUnavailable.

    The kernel engine splices `flows_max` flows at a time, and locks memory for so many; more are relayed.

    Takes some 0.2 s when it looks at the kernel, and a second more where the program was never compiled.
    """
    missing = _look_at_the_kernel(try_it=wanted != "relay")
    if wanted == "relay":
        return EngineChoice(RelayEngine(), "asked for")
    if not missing:
        from kernel_steer.engine.kernel import KernelEngine

        try:
            return EngineChoice(KernelEngine(flows_max), "the self-test passed on this kernel")
        except (OSError, RuntimeError) as error:
            missing = f"no kernel engine: {error}"
    if wanted == "kernel":
        raise EngineUnavailable(missing)
    return EngineChoice(RelayEngine(), missing)


def _look_at_the_kernel(*, try_it: bool) -> str:
    """What speaks against the kernel engine. Also, always, completes the journals of killed gateways."""
    complete_journals()
    try:
        from kernel_steer.engine.kernel import selftest
    except (ImportError, OSError) as error:
        return f"no kernel engine: {error}"
    failed = next((check for check in selftest.run() if not check.ok), None) if try_it else None
    return f"no kernel engine: {failed.detail}" if failed else ""


def complete_journals(left: Sequence[Slot] = ()) -> None:
    """Adds to the journals of killed gateways what only the kernel knows; before such a journal is read.

    `left`: the slots that are about to be read; returns when they are complete, whoever completes them. Blocks.
    """
    try:
        # Not at the top: on other systems than Linux the package cannot even be imported.
        from kernel_steer.engine.kernel import recovery
    except (ImportError, OSError):
        return
    recovery.complete_journals()
    recovery.wait_until_complete(left)
