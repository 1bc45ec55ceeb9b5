"""Listening for "this machine goes away", whatever the provider.

A source knows one provider's metadata service and answers one question: what is announced now? The
listener asks it for as long as the machine lives, one call at a time, and passes on each notice once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

logger = logging.getLogger(__name__)

# A notice can be as short as 30 s, so even a sick metadata service is asked this often.
BACKOFF_MAX_S = 10.0
# What was announced counts as cancelled when it has been missing for this long and in this many polls:
# one wrong 404 of a sick service must not bring a doomed node back.
CANCELLED_AFTER_S = 10.0
_CANCELLED_AFTER_POLLS = 3


@dataclass(frozen=True, slots=True)
class Notice:
    """A provider's word that it takes a machine. `deadline` is aware UTC, None when it named none.

    A deadline may lie in the past (a slow poll, a clock that is off): the machine goes all the same.
    """

    source: str  # aws, gcp, azure, sigterm, ...
    action: str  # terminate, stop, hibernate, preempt
    deadline: datetime | None
    instance: str
    event: str = ""  # the provider's own name for it, where it gives one

    def key(self) -> tuple[str, str, str]:
        """What makes two notices the same. Some providers give a slightly different time at every
        poll, so it is rounded to the minute; a name of the event's own is better."""
        if self.event:
            return (self.instance, self.action, self.event)
        if self.deadline is None:
            return (self.instance, self.action, "")
        rounded = (self.deadline.astimezone(UTC) + timedelta(seconds=30)).replace(second=0, microsecond=0)
        return (self.instance, self.action, rounded.isoformat())


class SourceUnavailable(Exception):
    """The metadata service gave no usable answer; ask again later."""


class Source(Protocol):
    """One provider's metadata service. Called from one thread, never twice at a time."""

    name: str
    interval_s: float  # the pause between two polls that the provider finds polite

    def poll(self) -> Sequence[Notice]:
        """What is announced now; empty when nothing is. May wait for news; raises SourceUnavailable."""
        ...

    def acknowledge(self, notice: Notice) -> None:
        """The machine is empty: the provider need not wait. Nothing where it has no such call.

        Raises SourceUnavailable.
        """
        ...


class Listener(threading.Thread):
    """Asks `source` again and again and calls `on_notice` once for each notice.

    `on_cancelled` is called with the last notice when nothing is announced any more; the same notice is
    news after that. `is_drained` says whether the work is done that a notice is about; the provider is
    told then. When a call raises, what it was about comes again at the next poll.
    Runs until `stop` is set; nothing that the metadata service does ends it earlier.
    """

    def __init__(
        self,
        source: Source,
        on_notice: Callable[[Notice], None],
        *,
        on_cancelled: Callable[[Notice], None] | None = None,
        is_drained: Callable[[Notice], bool] | None = None,
        interval_s: float | None = None,
        cancelled_after_s: float = CANCELLED_AFTER_S,
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__(name=f"listener-{source.name}", daemon=True)
        self._source = source
        self._on_notice = on_notice
        self._on_cancelled = on_cancelled
        self._is_drained = is_drained
        self._interval_s = source.interval_s if interval_s is None else interval_s
        self._cancelled_after_s = cancelled_after_s
        self._delivered: dict[tuple[str, str, str], Notice] = {}
        self._acknowledged: set[tuple[str, str, str]] = set()
        self._missing_since: float | None = None
        self._missing_polls = 0
        self.stop = stop or threading.Event()

    def run(self) -> None:
        delay_s = self._interval_s
        while not self.stop.is_set():
            try:
                notices = self._source.poll()
                self._take(notices)
            except Exception as error:
                expected = isinstance(error, SourceUnavailable)
                logger.warning(
                    "%s metadata: %s", self._source.name, error, exc_info=None if expected else error
                )
                self._missing_since, self._missing_polls = None, 0  # no answer is no word of a cancellation
                delay_s = min(delay_s * 2, max(BACKOFF_MAX_S, self._interval_s))
            else:
                delay_s = self._interval_s
            self.stop.wait(delay_s)

    def _take(self, notices: Sequence[Notice]) -> None:
        if notices:
            self._missing_since, self._missing_polls = None, 0
        elif self._delivered:
            self._look_for_cancellation()
        for notice in notices:
            self._deliver(notice)
        for notice in notices:
            self._acknowledge(notice)

    def _deliver(self, notice: Notice) -> None:
        if notice.key() in self._delivered:
            return
        logger.warning(
            "%s announces: %s of %s at %s", notice.source, notice.action, notice.instance, notice.deadline
        )
        try:
            self._on_notice(notice)
        except Exception:
            logger.exception("notice not passed on, it comes again at the next poll")
        else:
            self._delivered[notice.key()] = notice

    def _look_for_cancellation(self) -> None:
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        self._missing_polls += 1
        if (
            self._missing_polls < _CANCELLED_AFTER_POLLS
            or now < self._missing_since + self._cancelled_after_s
        ):
            return
        *_, last = self._delivered.values()
        logger.warning("%s announces nothing any more: %s of %s", last.source, last.action, last.instance)
        if self._on_cancelled is not None:
            self._on_cancelled(last)
        self._delivered.clear()
        self._acknowledged.clear()
        self._missing_since, self._missing_polls = None, 0

    def _acknowledge(self, notice: Notice) -> None:
        key = notice.key()
        if self._is_drained is None or key not in self._delivered or key in self._acknowledged:
            return
        if self._is_drained(notice):
            self._source.acknowledge(notice)
            self._acknowledged.add(key)
