"""Where the output of supervised processes goes: one file each, and the console with a coloured prefix."""

from __future__ import annotations

import logging
import os
from collections import deque
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

_FILE_BYTES = 10_000_000
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LAST_LINES = 5


class LogSink:
    """`write(name, line)` from one thread only. Without a console the lines go to the files alone."""

    def __init__(self, folder: Path, console: TextIO | None, width: int = 12) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._console = console
        self._width = width
        self._coloured = console is not None and console.isatty() and "NO_COLOR" not in os.environ
        self._files: dict[str, RotatingFileHandler] = {}
        self._last: dict[str, deque[str]] = {}

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def write(self, name: str, line: str) -> None:
        if name not in self._files:
            self._files[name] = RotatingFileHandler(
                self.path(name), maxBytes=_FILE_BYTES, backupCount=1, encoding="utf-8"
            )
        self._files[name].emit(logging.makeLogRecord({"msg": line}))
        if line.strip():
            self._last.setdefault(name, deque(maxlen=_LAST_LINES)).append(line)
        if self._console is not None:
            try:
                self._console.write(f"{self._prefix(name)} {line}\n")
                self._console.flush()
            except OSError:  # the terminal is gone; the files are still there
                self._console = None

    def last_lines(self, name: str) -> list[str]:
        """What the process said last, for the message about its end."""
        return list(self._last.get(name, ()))

    def close(self) -> None:
        for handler in self._files.values():
            handler.close()
        self._files.clear()

    def _prefix(self, name: str) -> str:
        text = f"{name:<{self._width}} |"
        if not self._coloured:
            return text
        return f"\x1b[{_COLOURS[sum(name.encode()) % len(_COLOURS)]}m{text}\x1b[0m"
