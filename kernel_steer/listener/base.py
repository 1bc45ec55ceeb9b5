"""Listening for "this machine goes away", whatever the provider.

A source knows one provider's metadata service and answers one question: what is announced now? The
listener asks it for as long as the machine lives, one call at a time, and passes on each notice once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

logger = logging.getLogger(__name__)

# A notice can be as short as 30 s, so even a sick metadata service is asked this often.
BACKOFF_MAX_S = 10.0


@dataclass(frozen=True, slots=True)
class Notice:
    """A provider's word that it takes a machine. `deadline` is aware UTC, None when it named none.

    A deadline may lie in the past (a slow poll, a clock that is off): the machine goes all the same.
    """

    source: str  # aws, gcp, azure, sigterm, ...
    action: str  # terminate, stop, hibernate, preempt
    deadline: datetime | None
    instance: str

    def key(self) -> tuple[str, str, str]:
        """What makes two notices the same. Some providers give a slightly different time at every
        poll, so it is rounded to the minute."""
        if self.deadline is None:
            return (self.instance, self.action, "")
        rounded = (self.deadline.astimezone(UTC) + timedelta(seconds=30)).replace(second=0, microsecond=0)
        return (self.instance, self.action, rounded.isoformat())


class SourceUnavailable(Exception):
    """The metadata service gave no usable answer; ask again later."""


class Source(Protocol):
    """One provider's metadata service. Called from one thread, never twice at a time."""

    name: str

    def poll(self) -> Sequence[Notice]:
        """What is announced now; empty when nothing is. Returns or raises SourceUnavailable in seconds."""
        ...


class Listener(threading.Thread):
    """Asks `source` every `interval_s` and calls `on_notice` once for each notice.

    When `on_notice` raises, the notice counts as not delivered and comes again at the next poll.
    Runs until `stop` is set; nothing that the metadata service does ends it earlier.
    """

    def __init__(
        self,
        source: Source,
        on_notice: Callable[[Notice], None],
        *,
        interval_s: float = 2.0,
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__(name=f"listener-{source.name}", daemon=True)
        self._source = source
        self._on_notice = on_notice
        self._interval_s = interval_s
        self._delivered: set[tuple[str, str, str]] = set()
        self.stop = stop or threading.Event()

    def run(self) -> None:
        delay_s = self._interval_s
        while not self.stop.is_set():
            try:
                notices = self._source.poll()
            except Exception as error:
                expected = isinstance(error, SourceUnavailable)
                logger.warning(
                    "%s metadata: %s", self._source.name, error, exc_info=None if expected else error
                )
                delay_s = min(delay_s * 2, max(BACKOFF_MAX_S, self._interval_s))
            else:
                delay_s = self._interval_s
                for notice in notices:
                    self._deliver(notice)
            self.stop.wait(delay_s)

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
            self._delivered.add(notice.key())
