"""Runs every check at the same time, on every poll, in under two seconds whatever hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db import connections

log = logging.getLogger(__name__)

PASS, WARN, FAIL = "pass", "warn", "fail"
_SEVERITY = {PASS: 0, WARN: 1, FAIL: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `detail` is public: a fixed sentence with counts, never a host, path or exception."""

    status: str
    detail: str


Check = Callable[[], Finding]


@dataclass(frozen=True, slots=True)
class Report:
    """One run of all checks; `status` is the worst of them."""

    status: str
    checked_at: datetime
    checks: Mapping[str, Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "version": settings.VERSION,
            "checked_at": self.checked_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "checks": {name: dict(check) for name, check in self.checks.items()},
        }


class Matrix:
    """`poll` runs the checks; polls that arrive within `share_s` of a run's start get that run's report,
    so a flood of polls costs one run a second.

    A check has until `limit_s`. One that is still hanging at the next poll is reported as failed and
    not started again, so hanging parts cost one thread each and no more.
    """

    def __init__(self, checks: Mapping[str, Check], *, limit_s: float = 1.7, share_s: float = 1.0) -> None:
        self._checks = checks
        self._limit_s = limit_s
        self._share_s = share_s
        self._turn = threading.Lock()
        self._running: dict[str, Future[tuple[Finding, float]]] = {}
        self._last: tuple[float, Report] | None = None

    def poll(self) -> Report:
        with self._turn:
            started = time.monotonic()
            if self._last and started - self._last[0] < self._share_s:
                return self._last[1]
            report = self._run(started)
            self._last = (started, report)
            return report

    def _run(self, started: float) -> Report:
        checked_at = datetime.now(UTC)
        for name, check in self._checks.items():
            late = self._running.get(name)
            # What a late check found in the meantime is old news.
            if late is None or late.done():
                self._running[name] = _in_thread(name, check)
        checks = {name: self._collect(name, started) for name in self._checks}
        worst = max(
            (str(check["status"]) for check in checks.values()), key=_SEVERITY.__getitem__, default=PASS
        )
        return Report(worst, checked_at, checks)

    def _collect(self, name: str, started: float) -> dict[str, Any]:
        left_s = max(0.0, started + self._limit_s - time.monotonic())
        try:
            finding, took_s = self._running[name].result(timeout=left_s)
        except FutureTimeoutError:
            finding, took_s = Finding(FAIL, "no answer in time"), self._limit_s
        else:
            del self._running[name]
        return {"status": finding.status, "latency_ms": round(took_s * 1000, 1), "detail": finding.detail}


def _in_thread(name: str, check: Check) -> Future[tuple[Finding, float]]:
    future: Future[tuple[Finding, float]] = Future()

    def work() -> None:
        started = time.perf_counter()
        try:
            finding = check()
        except Exception as error:  # noqa: BLE001 - whatever broke, the matrix has to say so
            # The text of an exception may name hosts or secrets; its type is enough for the log.
            log.warning("health check %s failed: %s", name, type(error).__name__)
            finding = Finding(FAIL, "not reachable or not working")
        finally:
            connections.close_all()
        future.set_result((finding, time.perf_counter() - started))

    # Daemon threads: a check that hangs must not keep the process from ending.
    threading.Thread(target=work, name=f"health-{name}", daemon=True).start()
    return future
