"""Tells a Celery worker that there is something to charge. Best effort: beat asks anyway."""

from __future__ import annotations

import asyncio
import logging

from celery import current_app
from kombu.exceptions import KombuError

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.25
TASK = "brokerage.tasks.charge_usage"


class ChargeNudge:
    """One message for many answers, sent from a thread because a silent broker blocks."""

    def __init__(self) -> None:
        self._wanted = False
        self._task: asyncio.Task[None] | None = None

    def send(self) -> None:
        """Returns at once. What comes while a message is under way is covered by the next one."""
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="charge-nudge")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                await asyncio.to_thread(_publish)
            except (OSError, KombuError) as error:
                logger.warning("charging waits for beat, the broker is away: %s", error)
            await asyncio.sleep(MIN_INTERVAL_S)


def _publish() -> None:
    # A message nobody took in time would only charge what a later one charges too.
    current_app.send_task(TASK, expires=60, retry=False)
