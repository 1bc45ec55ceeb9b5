"""A node says that it goes away, or that it stays after all. Runs on the node: it has Redis and no database."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from celery import Celery, current_app
from django.conf import settings

from kernel_steer import signals
from kernel_steer.listener.base import Notice

logger = logging.getLogger(__name__)

BOOK_EVICTION = "brokerage.tasks.book_eviction"
RECORD_REFUSED_SIGNALS = "brokerage.tasks.record_refused_signals"
_BACKOFF_S = (0.05, 2.0)
_REFUSALS_EXPIRE_S = 3600


class Lane(threading.Thread):
    """One way out of the node: carries signals in their order, each until it has arrived.

    A way that is blocked does not hold up another. Ends when `stop` is set, and names what is left.
    """

    def __init__(self, name: str, carry: Callable[[signals.Signal], None], stop: threading.Event) -> None:
        super().__init__(name=f"eviction-{name}", daemon=True)
        self._carry = carry
        self._stop_event = stop
        self._waiting: queue.SimpleQueue[signals.Signal | None] = queue.SimpleQueue()
        self._open = 0
        self._changed = threading.Condition()

    def put(self, signal: signals.Signal) -> None:
        with self._changed:
            self._open += 1
        self._waiting.put(signal)

    def run(self) -> None:
        while not self._stop_event.is_set() and (signal := self._waiting.get()) is not None:
            if not self._carry_until_done(signal):
                logger.error("left without: %s of node %s", self.name, signal.node)
                return
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _carry_until_done(self, signal: signals.Signal) -> bool:
        delay_s = _BACKOFF_S[0]
        while True:
            try:
                self._carry(signal)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may succeed
                logger.warning("%s not delivered yet (%s)", self.name, type(error).__name__)
            else:
                return True
            if self._stop_event.wait(delay_s):
                return False
            delay_s = min(delay_s * 2, _BACKOFF_S[1])

    def wait_empty(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def wake(self) -> None:
        """After `stop` was set: a lane that has nothing to do notices it."""
        self._waiting.put(None)


class Announcer:
    """Tells the gateways and the books what becomes of this node.

    The flip is written where gateways run on this host, and the datagrams are out, when `announce` returns.
    The stream, and the task for the books, follow each in its own time, and are tried until they are done.
    Receivers take the same word twice.
    """

    def __init__(self, *, app: Celery, node: str, epoch: int) -> None:
        """`epoch` is the incarnation of the node that the announcements are about."""
        self._app = app
        self._node = node
        self._epoch = epoch
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._last_at = datetime.min.replace(tzinfo=UTC)
        self._redis = signals.connect(settings.REDIS_URL)
        self._book = signals.GatewayBook(signals.connect(settings.REDIS_URL), self._stop)
        self._lanes = (
            Lane("signal", self._publish, self._stop),
            Lane("booking", self._send_booking, self._stop),
        )

    def start(self) -> None:
        for thread in (self._book, *self._lanes):
            thread.start()

    def announce(self, notice: Notice) -> None:
        """The node goes away."""
        self._say(notice, notice.action)

    def cancel(self, notice: Notice) -> None:
        """What `notice` said is not so any more."""
        self._say(notice, signals.CANCEL)

    def _say(self, notice: Notice, action: str) -> None:
        # Inside the lock, so that the order of the times is the order in which the words go out.
        with self._lock:
            signal = signals.Signal(
                node=self._node,
                epoch=self._epoch,
                action=action,
                source=notice.source,
                signal_at=self._next_moment(),
                deadline=notice.deadline,
            )
            written = self._book.own_host.tell(signal)
            try:
                reached = self._book.send(signal, settings.STEER_SIGNAL_KEY)
            except ValueError as error:
                reached = 0
                logger.warning("%s", error)
            for lane in self._lanes:
                lane.put(signal)
        logger.info(
            "%s of node %s: written on this host %d times, sent to %d gateways",
            action,
            self._node,
            written,
            reached,
        )

    def _next_moment(self) -> datetime:
        """Now, but always later than before: a clock may be set back, and the newest word counts."""
        self._last_at = max(datetime.now(UTC), self._last_at + timedelta(microseconds=1))
        return self._last_at

    def flush(self, timeout_s: float) -> bool:
        """Whether all that was said has arrived, after waiting for it."""
        ends_at = time.monotonic() + timeout_s
        return all(lane.wait_empty(max(0.0, ends_at - time.monotonic())) for lane in self._lanes)

    def stop(self) -> None:
        """Gives up on what has not arrived."""
        self._stop.set()
        for lane in self._lanes:
            lane.wake()
        for thread in (self._book, *self._lanes):
            thread.join(timeout=1)
        self._redis.close()

    def _publish(self, signal: signals.Signal) -> None:
        try:
            signals.publish(self._redis, signal, settings.STEER_SIGNAL_KEY)
        except Exception:
            self._redis.close()  # a broken connection must not be tried again
            raise

    def _send_booking(self, signal: signals.Signal) -> None:
        self._app.send_task(
            BOOK_EVICTION,
            kwargs={
                "node": signal.node,
                "epoch": signal.epoch,
                "action": signal.action,
                "source": signal.source,
                "signal_at": signal.signal_at.isoformat(),
                "deadline": signal.deadline.isoformat() if signal.deadline else None,
            },
            queue="celery",
            retry=False,
        )


def report_refused_signals(refusals: signals.Refusals) -> None:
    """In the gateway: what it did not believe goes to the audit trail. Raises when the broker is away."""
    current_app.send_task(
        RECORD_REFUSED_SIGNALS,
        kwargs={
            "gateway": refusals.gateway,
            "reason": refusals.reason,
            "carrier": refusals.carrier,
            "count": refusals.count,
        },
        queue="celery",
        expires=_REFUSALS_EXPIRE_S,
        retry=False,
    )
