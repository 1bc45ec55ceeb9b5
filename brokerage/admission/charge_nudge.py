"""Tells a Celery worker that there is something to charge. Best effort: beat asks anyway."""

from __future__ import annotations

import logging
import threading
import time

from celery import current_app
from kombu.exceptions import KombuError

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.25
TASK = "brokerage.tasks.charge_usage"


class ChargeNudge:
    """One message for many answers. In a thread of its own, because a broker that is away blocks for
    seconds; a daemon, so that it never holds up the end of the gateway."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._stopped = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="charge-nudge", daemon=True).start()

    def send(self) -> None:
        """Returns at once. What comes while a message is under way is covered by the next one."""
        self._wanted.set()

    def stop(self) -> None:
        self._stopped = True
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopped:
                return
            try:
                # A message nobody takes in time would charge what a later one charges too.
                current_app.send_task(TASK, expires=60, retry=False)
            except (OSError, KombuError) as error:
                logger.warning("charging waits for beat, the broker is away: %s", error)
            time.sleep(MIN_INTERVAL_S)
