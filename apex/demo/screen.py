"""What the person at the terminal sees. On a terminal the streams move; in a log there is a line now and then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from apex.demo.clients import Stream
from apex.demo.report import Report

_BAR = 24
_LINE_EVERY_S = 2.0


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = 120  # a log file has no width; 80 would break lines
        self._started = time.monotonic()

    def scene(self, text: str) -> None:
        self._console.print(f"[bold cyan]{self._clock()}[/] [bold]{text}[/]")

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{self._clock()}[/]   {text}")

    def _clock(self) -> str:
        return f"{time.monotonic() - self._started:6.1f} s"

    async def watch(self, streams: Sequence[Stream], tokens: int) -> None:
        """Shows the streams until it is cancelled or all have ended."""
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=8, transient=False) as live:
                while not all(stream.ended for stream in streams):
                    live.update(_streams_table(streams, tokens))
                    await asyncio.sleep(0.12)
                live.update(_streams_table(streams, tokens))
            return
        while not all(stream.ended for stream in streams):
            await asyncio.sleep(_LINE_EVERY_S)
            self.say("tokens so far: " + " ".join(str(len(stream.ids)) for stream in streams))

    def result(self, report: Report) -> None:
        table = Table(title="What was promised, and what happened", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(justify="right")
        data = report.as_json()
        for name, label in _ROWS.items():
            value = data[name]
            if isinstance(value, dict):
                value = " / ".join("-" if v is None else f"{v:.1f}" for v in value.values()) + " ms"
            table.add_row(label, str(value))
        self._console.print(table)
        self._console.print(
            "  [dim]* greedy, so mostly the same. The engine rounds differently in another batch, and where two tokens"
            " are\n    nearly equal it may then take the other: a valid continuation, not a lost token.[/]"
        )
        for promise, kept in report.promises.items():
            self._console.print(f"  {'[green]kept  [/]' if kept else '[bold red]BROKEN[/]'} {promise}")
        for error in report.errors:
            self._console.print(f"  [red]{error}[/]")

    def log_ins(self, report: Report, credentials: dict[str, dict[str, str]]) -> None:
        table = Table(title="Look around", show_header=False, title_justify="left")
        for name, url in report.urls.items():
            table.add_row(name, url)
        table.add_row("portal log-in", f"{credentials['pilot']['email']}  {credentials['pilot']['password']}")
        table.add_row(
            "back office log-in", f"{credentials['admin']['email']}  {credentials['admin']['password']}"
        )
        table.add_row("API key", credentials["pilot"]["api_key"])
        self._console.print(table)


_ROWS = {
    "engine": "engine",
    "streams": "answers in flight",
    "answers_resumed": "answers that lost their node",
    "client_resets": "client connections reset",
    "tokens_lost": "tokens lost",
    "tokens_duplicated": "tokens doubled",
    "texts_differing": "texts that differ from their tokens",
    "answers_identical": "answers word for word as undisturbed *",
    "resume_gap_ms": "pause at the cut, p50 / p99",
    "flip_ms": "signal to flip, p50 / p99",
    "reroute_ms": "signal to first byte from the standby, p50 / p99",
    "delivered_tokens": "tokens delivered",
    "charged_tokens": "tokens charged",
    "ledger_ok": "books verified",
}


def _streams_table(streams: Sequence[Stream], tokens: int) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    for stream in streams:
        filled = min(_BAR, len(stream.ids) * _BAR // tokens)
        state = "[green]done[/]" if stream.finish_reason else "[red]failed[/]" if stream.error else ""
        tail = stream.text.replace("\n", " ")[-44:].replace("[", "(")
        table.add_row(
            f"{stream.number + 1}",
            "━" * filled + "[dim]━[/]" * (_BAR - filled),
            f"{len(stream.ids):>4}",
            state,
            tail,
        )
    return table
