"""A node says that it goes away. Runs on the node: it has Redis and no database."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from celery import Celery
from django.conf import settings

from kernel_steer import signals
from kernel_steer.listener.base import Notice

logger = logging.getLogger(__name__)

BOOK_EVICTION = "brokerage.tasks.book_eviction"
_BACKOFF_S = (0.05, 2.0)


def announce_eviction(*, app: Celery, node: str, epoch: int, notice: Notice, stop: threading.Event) -> bool:
    """Tells the gateways (signed stream, at once) and the books (task, durable) that the node goes away.

    Either carrier is tried until it is done, without waiting for the other; receivers take the same word
    twice. Returns whether both are done; False only when `stop` was set before.
    """
    signal = signals.Signal(
        node=node,
        epoch=epoch,
        action=notice.action,
        source=notice.source,
        signal_at=datetime.now(UTC),
        deadline=notice.deadline,
    )
    carriers = {"signal": lambda: _publish(signal), "booking": lambda: _book(app, signal)}
    delay_s = _BACKOFF_S[0]
    while True:
        carriers = {name: carry for name, carry in carriers.items() if not _try(name, carry)}
        if not carriers:
            return True
        if stop.wait(delay_s):
            logger.error("left without: %s", ", ".join(carriers))
            return False
        delay_s = min(delay_s * 2, _BACKOFF_S[1])


def _try(name: str, carry: Callable[[], None]) -> bool:
    try:
        carry()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other carrier and the next try go on
        logger.warning("eviction %s not delivered yet (%s)", name, type(error).__name__)
        return False
    return True


def _publish(signal: signals.Signal) -> None:
    client = signals.connect(settings.REDIS_URL)
    try:
        signals.publish(client, signal, settings.STEER_SIGNAL_KEY)
    finally:
        client.close()


def _book(app: Celery, signal: signals.Signal) -> None:
    app.send_task(
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
