"""Google Cloud: `instance/preempted`, a question that hangs until the answer changes, and `maintenance-event`.

https://cloud.google.com/compute/docs/instances/create-use-spot#handle-preemption
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
A Spot VM gets 30 s between the word and the end, so asking now and then would often be too late. Maintenance is told
60 s ahead, to a VM with GPUs an hour, and only to who asks for it: once between two hanging questions is enough.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from kernel_steer.listener.base import Notice, SourceUnavailable
from kernel_steer.listener.http import TIMEOUT_S, Answer, MetadataClient

logger = logging.getLogger(__name__)

_INSTANCE = "/computeMetadata/v1/instance"
_PREEMPTED = f"{_INSTANCE}/preempted"
_MAINTENANCE = f"{_INSTANCE}/maintenance-event"
_FLAVOR = {"Metadata-Flavor": "Google"}
# From the ACPI soft-off to the hard one. GCP names no time itself.
_GRACE = timedelta(seconds=30)
# The shortest that GCP gives. It names no time here either, and a listener that started late cannot know more.
_MAINTENANCE_GRACE = timedelta(seconds=60)
WAIT_S = 30


class GCPMetadata:
    """A Source whose `poll` hangs for up to `wait_s` seconds; the first one answers at once."""

    name = "gcp"
    interval_s = 1.0  # and a change in between is not missed: the next question names the last ETag

    def __init__(
        self, base_url: str, instance: str, *, timeout_s: float = TIMEOUT_S, wait_s: int = WAIT_S
    ) -> None:
        self._client = MetadataClient(base_url, timeout_s=timeout_s)
        self._instance = instance
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._etag: str | None = None
        self._preempted: Notice | None = None
        self._maintenance: Notice | None = None
        self._migration_told = False

    def poll(self) -> Sequence[Notice]:
        self._look_at_maintenance()
        self._wait_for_preemption()
        return [notice for notice in (self._preempted, self._maintenance) if notice is not None]

    def _wait_for_preemption(self) -> None:
        path, timeout_s = _PREEMPTED, self._timeout_s
        # While a maintenance is announced the listener must hear of its end too.
        if self._etag is not None and self._maintenance is None:
            query = {"wait_for_change": "true", "timeout_sec": str(self._wait_s), "last_etag": self._etag}
            path, timeout_s = f"{_PREEMPTED}?{urlencode(query)}", self._timeout_s + self._wait_s
        etag, self._etag = self._etag, None  # after a failure the next poll does not hang
        answer = self._ask(path, timeout_s)
        match answer.body.upper():
            case "TRUE":
                if self._preempted is None:
                    self._preempted = self._notice("preempt", _GRACE)
            case "FALSE":
                self._preempted = None
            case _:
                raise SourceUnavailable("instance/preempted is neither TRUE nor FALSE")
        self._etag = answer.headers.get("ETag") or etag

    def _look_at_maintenance(self) -> None:
        """A VM that is stopped for it leaves; one that is only moved pauses for some seconds and stays."""
        try:
            said = self._ask(_MAINTENANCE, self._timeout_s).body.upper()
        except SourceUnavailable as error:
            # What was announced stands. The question that counts comes next and fails for itself.
            logger.info("gcp metadata: %s", error)
            return
        match said:
            case "TERMINATE_ON_HOST_MAINTENANCE":
                if self._maintenance is None:
                    self._maintenance = self._notice("terminate", _MAINTENANCE_GRACE)
            case "NONE" | "MIGRATE_ON_HOST_MAINTENANCE":
                self._maintenance = None
            case _:
                logger.info("gcp metadata: maintenance-event is %.40r, which means nothing here", said)
        migrates = said == "MIGRATE_ON_HOST_MAINTENANCE"
        if migrates and not self._migration_told:
            logger.info("this machine will be moved for maintenance (advice only, nothing is moved here)")
        self._migration_told = migrates

    def _ask(self, path: str, timeout_s: float) -> Answer:
        answer = self._client.call("GET", path, _FLAVOR, timeout_s=timeout_s)
        if answer.status != 200:
            raise SourceUnavailable(f"status {answer.status} for {path.partition('?')[0]}")
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise SourceUnavailable("an answer that is not from Google's metadata service")
        return answer

    def _notice(self, action: str, grace: timedelta) -> Notice:
        # One name for as long as it is announced.
        event = f"{action}-{time.monotonic_ns()}"
        return Notice("gcp", action, datetime.now(UTC) + grace, self._instance, event=event)

    def acknowledge(self, notice: Notice) -> None:
        """GCP has no such call."""
