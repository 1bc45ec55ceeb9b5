"""One machine as its metadata service knows it, the orders it takes and the faults it shows."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

FAULTS = {
    "status": "every answer has it: 401, 404, 429, 503",
    "token_status": "the same, only for session tokens",
    "times": "how many answers `status` and `token_status` spoil; without it all",
    "slow_s": "every answer takes this long",
    "slow_first_s": "only the next answer does",
    "jitter": "another time at every request",
    "clock_off_s": "the time is off by this much",
    "foreign": "notices name this machine",
    "body": "sent instead of the payload",
    "decoys": "this many events of other machines around ours, in another order each time (Azure)",
    "twice": "every event is listed twice (Azure)",
    "legacy": "only the legacy item speaks (AWS)",
    "unflavoured": "the answer does not say that it is Google's",
}


@dataclass
class Instance:
    """Times are aware UTC."""

    name: str
    action: str | None = None
    deadline: datetime | None = None
    # Azure's own words for it.
    event_id: str = ""
    event_type: str = "Preempt"
    event_status: str = "Scheduled"
    resources: list[str] = field(default_factory=list)
    started_events: list[str] = field(default_factory=list)

    rebalance_at: datetime | None = None
    maintenance: str = "NONE"  # as GCP says it
    faults: dict[str, Any] = field(default_factory=dict)
    token_ends: dict[str, float] = field(default_factory=dict)
    version: int = 1  # grows with every change that a provider would announce
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    requests: int = 0
    tokens_issued: int = 0
    outstanding: int = 0
    outstanding_max: int = 0

    # --- faults ----------------------------------------------------------------------------------------

    def spoil(self, kind: str) -> int | None:
        """The status that a fault imposes on this answer."""
        status = self.faults.get(kind)
        if status is None or self.faults.get("times", 1) < 1:
            return None
        if "times" in self.faults:
            self.faults["times"] -= 1
        return int(status)

    def delay_s(self) -> float:
        return float(self.faults.pop("slow_first_s", self.faults.get("slow_s", 0)))

    def told_deadline(self) -> datetime:
        """The deadline as this service tells it now."""
        assert self.deadline is not None
        jitter_ms = random.randint(0, 900) if self.faults.get("jitter") else 0  # noqa: S311
        return self.deadline + timedelta(
            milliseconds=jitter_ms, seconds=float(self.faults.get("clock_off_s", 0))
        )

    def told_time(self) -> str:
        """The same in ISO 8601; a time that jitters has milliseconds."""
        return iso_time(self.told_deadline(), exact=bool(self.faults.get("jitter")))

    # --- session tokens --------------------------------------------------------------------------------

    def issue_token(self, ttl: str) -> str | None:
        """None when the life asked for, in seconds, is none that AWS and Alibaba give."""
        if not ttl.isdecimal() or not 1 <= int(ttl) <= 21_600:
            return None
        token = secrets.token_urlsafe(40)
        self.token_ends[token] = time.monotonic() + int(ttl)
        self.tokens_issued += 1
        return token

    def accepts_token(self, token: str) -> bool:
        return self.token_ends.get(token, 0) >= time.monotonic()

    # --- orders ----------------------------------------------------------------------------------------

    def obey(self, order: dict[str, Any]) -> None:
        """Raises ValueError, KeyError, TypeError or AttributeError for what is no order."""
        for name, value in order.items():
            match name:
                case "schedule":
                    self._schedule(value)
                case "cancel":
                    self.action = self.deadline = None
                    self._announce()
                case "rebalance":
                    self.rebalance_at = datetime.now(UTC)
                case "maintenance":
                    self.maintenance = str(value)
                case "expire_tokens":
                    self.token_ends.clear()
                case "faults":
                    if unknown := set(value) - set(FAULTS):
                        raise ValueError(f"unknown faults {sorted(unknown)}")
                    self.faults = dict(value)
                case _:
                    raise ValueError(f"unknown order {name!r}")

    def _schedule(self, value: dict[str, Any]) -> None:
        self.deadline = datetime.now(UTC) + timedelta(seconds=float(value.get("in_s", 120)))
        self.action = str(value.get("action", "terminate"))
        self.event_id = secrets.token_hex(16).upper()
        self.event_type = str(value.get("type", "Preempt"))
        self.event_status = str(value.get("status", "Scheduled"))
        self.resources = [str(name) for name in value.get("resources", [self.name])]
        self._announce()

    def _announce(self) -> None:
        self.version += 1
        waiting, self.changed = self.changed, asyncio.Event()
        waiting.set()

    def start_event(self, event_id: str) -> bool:
        """Azure: the event need not wait any longer. False when there is no such event."""
        if self.deadline is None or event_id != self.event_id:
            return False
        self.started_events.append(event_id)
        self.event_status = "Started"
        self._announce()
        return True

    def counters(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "tokens_issued": self.tokens_issued,
            "outstanding_max": self.outstanding_max,
            "started_events": self.started_events,
            "event_id": self.event_id,
            "action": self.action,
            "deadline": iso_time(self.deadline) if self.deadline else None,
        }


def iso_time(moment: datetime, *, exact: bool = False) -> str:
    """As AWS and Alibaba write it; `exact` with milliseconds."""
    return (
        moment.astimezone(UTC)
        .isoformat(timespec="milliseconds" if exact else "seconds")
        .replace("+00:00", "Z")
    )
