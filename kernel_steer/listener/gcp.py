"""Google Cloud: `instance/preempted`, a question that hangs until the answer changes.

https://cloud.google.com/compute/docs/instances/create-use-spot#handle-preemption
A Spot VM gets 30 s between the word and the end, so asking now and then would often be too late.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from kernel_steer.listener.base import Notice, SourceUnavailable
from kernel_steer.listener.http import TIMEOUT_S, MetadataClient

_PATH = "/computeMetadata/v1/instance/preempted"
_FLAVOR = {"Metadata-Flavor": "Google"}
# From the ACPI soft-off to the hard one. GCP names no time itself.
_GRACE = timedelta(seconds=30)
WAIT_S = 60


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

    def poll(self) -> Sequence[Notice]:
        path, timeout_s = _PATH, self._timeout_s
        if self._etag is not None:
            query = {"wait_for_change": "true", "timeout_sec": str(self._wait_s), "last_etag": self._etag}
            path, timeout_s = f"{_PATH}?{urlencode(query)}", self._timeout_s + self._wait_s
        etag, self._etag = self._etag, None  # after a failure the next poll does not hang
        answer = self._client.call("GET", path, _FLAVOR, timeout_s=timeout_s)
        if answer.status != 200:
            raise SourceUnavailable(f"status {answer.status} for {_PATH}")
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise SourceUnavailable("an answer that is not from Google's metadata service")
        match answer.body.upper():
            case "TRUE":
                if self._preempted is None:
                    self._preempted = Notice(
                        "gcp", "preempt", datetime.now(UTC) + _GRACE, self._instance, event=_event()
                    )
            case "FALSE":
                self._preempted = None
            case _:
                raise SourceUnavailable("instance/preempted is neither TRUE nor FALSE")
        self._etag = answer.headers.get("ETag") or etag
        return [self._preempted] if self._preempted else []

    def acknowledge(self, notice: Notice) -> None:
        """GCP has no such call."""


def _event() -> str:
    """One name for as long as the answer stays TRUE."""
    return f"preempted-{time.monotonic_ns()}"
