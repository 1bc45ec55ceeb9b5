"""The journals of one port: one for each gateway that lives there, and those of the dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from kernel_steer.engine import complete_journals
from kernel_steer.journal import Journal, JournalTaken

log = logging.getLogger("kernel_steer.gateway")


class JournalsTaken(RuntimeError):
    """More gateways than there are journals for."""


# A gateway that drains and its successor are two; more are there only when deploys follow each other closely.
_MAX = 16
CARETAKER_EVERY_S = 2.0


def open_journal(folder: Path, slots: int = 1024) -> Journal:
    """The first that no living gateway has. Raises JournalsTaken."""
    for path in _paths(folder):
        try:
            return Journal(path, slots)
        except JournalTaken:
            continue
    raise JournalsTaken(f"{_MAX} gateways work in {folder.name}: no journal is left")


class Caretaker:
    """Settles the journals of gateways that died, also of one that dies while it drains beside us."""

    def __init__(self, folder: Path, own: Journal, settle: Callable[[Journal], Awaitable[None]]) -> None:
        self._settle = settle
        self._unsettled = [path for path in _paths(folder) if path.exists() and path != own.path]

    async def run(self) -> None:
        """Returns when all are settled."""
        while self._unsettled:
            await asyncio.sleep(CARETAKER_EVERY_S)
            await self.look()

    async def look(self) -> None:
        await asyncio.to_thread(complete_journals)
        for path in list(self._unsettled):
            try:
                journal = Journal(path)
            except JournalTaken:
                continue
            except RuntimeError as error:
                log.error("%s", error)
                self._unsettled.remove(path)
                continue
            try:
                await self._settle(journal)
                if journal.in_use == 0:
                    self._unsettled.remove(path)
            finally:
                journal.close()


def _paths(folder: Path) -> list[Path]:
    return [folder / ("journal" if number == 0 else f"journal-{number}") for number in range(_MAX)]
