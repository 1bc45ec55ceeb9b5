"""The eviction signal: "node N, in its incarnation E, goes away". Signed, small, sent once per carrier.

The sure carrier is the Redis stream `steer:signals`. Idempotent by (node, epoch): a gateway that sees
the same signal twice does nothing the second time.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

STREAM = "steer:signals"
STREAM_MAX_ENTRIES = 10_000
_VERSION = "1"
# A notice can be about a deadline hours ahead, but the signal itself is sent when it is made.
MAX_AGE = timedelta(minutes=10)


class SignalRefused(ValueError):
    """Forged, malformed or stale; the message says which and holds no secret."""


@dataclass(frozen=True, slots=True)
class Signal:
    """`deadline` is when the provider takes the machine, None when it did not say. Aware UTC."""

    node: str
    epoch: int
    action: str  # terminate, stop, hibernate, preempt
    source: str  # aws, gcp, azure, sigterm, ...
    signal_at: datetime
    deadline: datetime | None = None

    def _payload(self) -> dict[str, str]:
        return {
            "v": _VERSION,
            "node": self.node,
            "epoch": str(self.epoch),
            "action": self.action,
            "source": self.source,
            "signal_at": self.signal_at.astimezone(UTC).isoformat(timespec="microseconds"),
            "deadline": self.deadline.astimezone(UTC).isoformat(timespec="microseconds") if self.deadline else "",
        }

    def to_fields(self, key: bytes) -> dict[str, str]:
        """The stream entry, signature included."""
        payload = self._payload()
        return payload | {"mac": _mac(payload, key)}

    @classmethod
    def from_fields(cls, fields: dict[str, str], key: bytes, *, now: datetime | None = None) -> Signal:
        """Checks the signature first and believes nothing before. Raises SignalRefused."""
        payload = {name: value for name, value in fields.items() if name != "mac"}
        if not hmac.compare_digest(_mac(payload, key), fields.get("mac", "")):
            raise SignalRefused("signal with a wrong signature")
        if payload.get("v") != _VERSION:
            raise SignalRefused("signal of an unknown version")
        try:
            signal = cls(
                node=payload["node"],
                epoch=int(payload["epoch"]),
                action=payload["action"],
                source=payload["source"],
                signal_at=datetime.fromisoformat(payload["signal_at"]),
                deadline=datetime.fromisoformat(payload["deadline"]) if payload["deadline"] else None,
            )
        except (KeyError, ValueError) as error:
            raise SignalRefused("signal with missing or malformed fields") from error
        if abs((now or datetime.now(UTC)) - signal.signal_at) > MAX_AGE:
            raise SignalRefused("signal older than ten minutes or from the future")
        return signal


def _mac(payload: dict[str, str], key: bytes) -> str:
    # Length-prefixed, so that no two different payloads give the same bytes.
    parts = [f"{len(k)}:{k}{len(v)}:{v}" for k, v in sorted(payload.items())]
    return hmac.new(key, "".join(parts).encode(), hashlib.sha256).hexdigest()
