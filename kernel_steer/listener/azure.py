"""Azure: scheduled events.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
The first call switches the feature on and may take two minutes. Events go to every VM of the set, so
only those that name this one count. Acknowledging an event starts it at once, for all that it names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_steer.listener.base import Notice, SourceUnavailable
from kernel_steer.listener.http import TIMEOUT_S, MetadataClient, parse_time

logger = logging.getLogger(__name__)

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
FIRST_TIMEOUT_S = 130.0
# What ends the engine. Freeze only pauses the machine for some seconds.
_ENDING = {"Preempt", "Terminate", "Redeploy", "Reboot"}
_STANDING = {"Scheduled", "Started"}


class AzureMetadata:
    """A Source. `instance` is what notices are filed under; which VM this is, Azure says itself."""

    name = "azure"
    interval_s = 1.0  # a Preempt may come 30 s ahead; Azure recommends once a second

    def __init__(
        self,
        base_url: str,
        instance: str,
        *,
        timeout_s: float = TIMEOUT_S,
        first_timeout_s: float = FIRST_TIMEOUT_S,
    ) -> None:
        self._client = MetadataClient(base_url, timeout_s=timeout_s)
        self._instance = instance
        self._timeout_s: float = first_timeout_s
        self._later_timeout_s = timeout_s
        self._vm: str | None = None
        self._shared: set[str] = set()  # events that name other VMs too

    def poll(self) -> Sequence[Notice]:
        if self._vm is None:
            self._vm = self._own_name()
        answer = self._client.call("GET", _EVENTS, _HEADERS, timeout_s=self._timeout_s)
        if answer.status != 200:
            raise SourceUnavailable(f"status {answer.status} for scheduledevents")
        self._timeout_s = self._later_timeout_s
        try:
            events = json.loads(answer.body)["Events"]
            notices = [self._notice(event) for event in events]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SourceUnavailable("scheduledevents is not the document that Azure describes") from None
        return [notice for notice in notices if notice is not None]

    def _own_name(self) -> str:
        answer = self._client.call("GET", _NAME, _HEADERS)
        if answer.status != 200 or not answer.body:
            raise SourceUnavailable(f"this VM's name is not known (status {answer.status})")
        return answer.body

    def _notice(self, event: Mapping[str, Any]) -> Notice | None:
        kind, resources = event["EventType"], event["Resources"]
        if self._vm not in resources or event["EventStatus"] not in _STANDING:
            return None
        if kind not in _ENDING:
            return None
        name = str(event["EventId"])
        if len(resources) > 1:
            self._shared.add(name)
        # A started event has no time any more.
        not_before = event.get("NotBefore")
        deadline = parse_time(not_before) if not_before else None
        return Notice("azure", str(kind).lower(), deadline, self._instance, event=name)

    def acknowledge(self, notice: Notice) -> None:
        if notice.event in self._shared:
            logger.info("event %.60s is not started early: it is about other machines too", notice.event)
            return
        body = json.dumps({"StartRequests": [{"EventId": notice.event}]}).encode()
        answer = self._client.call(
            "POST", _EVENTS, _HEADERS | {"Content-Type": "application/json"}, body=body
        )
        if answer.status != 200:
            raise SourceUnavailable(f"status {answer.status} for the start of an event")
        logger.info("told Azure that event %.60s may start", notice.event)
