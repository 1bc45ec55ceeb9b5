"""What a signal says, how it is signed, and why one is not believed."""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import orjson

_VERSION = "1"
# A notice can be about a deadline hours ahead, but the signal itself is sent when it is made.
MAX_AGE = timedelta(minutes=10)
# The action that takes an earlier signal of the same source back.
CANCEL = "cancel"
# Fits the smallest packet that every network carries whole (IPv6's minimum, less its headers).
DATAGRAM_BYTES_MAX = 1_200


class Refused(StrEnum):
    """Why a signal was not acted on."""

    FORGED = "forged"  # signed with another key, or changed, or not signed at all
    MALFORMED = "malformed"
    STALE = "stale"  # older than MAX_AGE, or from the future
    REPLAYED = "replayed"  # of an older incarnation, or overtaken by a newer word of the same source
    UNKNOWN_NODE = "unknown_node"


class SignalRefused(ValueError):
    """The message says why and holds no secret; `reason` is for counting."""

    def __init__(self, reason: Refused, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Refusals:
    """How often signals were refused for one reason on one carrier, since the last report."""

    gateway: str
    reason: str  # a value of Refused
    carrier: str
    count: int


@dataclass(frozen=True, slots=True)
class Signal:
    """`deadline` is when the provider takes the machine, None when it did not say. Aware UTC.

    `signal_at` orders the words of one source about one incarnation: the newest counts.
    """

    node: str
    epoch: int
    action: str  # terminate, stop, hibernate, preempt, ..., or CANCEL
    source: str  # aws, gcp, azure, sigterm, ...
    signal_at: datetime
    deadline: datetime | None = None

    @property
    def is_cancel(self) -> bool:
        return self.action == CANCEL

    def _payload(self) -> dict[str, str]:
        return {
            "v": _VERSION,
            "node": self.node,
            "epoch": str(self.epoch),
            "action": self.action,
            "source": self.source,
            "signal_at": self.signal_at.astimezone(UTC).isoformat(timespec="microseconds"),
            "deadline": self.deadline.astimezone(UTC).isoformat(timespec="microseconds")
            if self.deadline
            else "",
        }

    def to_fields(self, key: bytes) -> dict[str, str]:
        """The stream entry, signature included."""
        return dict(_signed(self, key))

    def to_datagram(self, key: bytes) -> bytes:
        """The same fields in one packet. Raises ValueError when they do not fit."""
        packet = orjson.dumps(self.to_fields(key))
        if len(packet) > DATAGRAM_BYTES_MAX:
            raise ValueError(f"a signal of {len(packet)} bytes does not fit a datagram")
        return packet

    @classmethod
    def from_fields(cls, fields: Mapping[str, str], key: bytes, *, now: datetime | None = None) -> Signal:
        """Checks the signature first and believes nothing before. Raises SignalRefused."""
        payload = {name: value for name, value in fields.items() if name != "mac"}
        if not hmac.compare_digest(_mac(payload, key).encode(), fields.get("mac", "").encode()):
            raise SignalRefused(Refused.FORGED, "signal with a wrong signature")
        if payload.get("v") != _VERSION:
            raise SignalRefused(Refused.MALFORMED, "signal of an unknown version")
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
            raise SignalRefused(Refused.MALFORMED, "signal with missing or malformed fields") from error
        if signal.signal_at.tzinfo is None:
            raise SignalRefused(Refused.MALFORMED, "signal with a time that names no zone")
        if abs((now or datetime.now(UTC)) - signal.signal_at) > MAX_AGE:
            raise SignalRefused(Refused.STALE, "signal older than ten minutes or from the future")
        return signal

    @classmethod
    def from_datagram(cls, packet: bytes, key: bytes, *, now: datetime | None = None) -> Signal:
        """Raises SignalRefused."""
        if len(packet) > DATAGRAM_BYTES_MAX:
            raise SignalRefused(Refused.MALFORMED, "packet longer than any signal")
        try:
            fields: Any = orjson.loads(packet)
        except orjson.JSONDecodeError:
            raise SignalRefused(Refused.MALFORMED, "packet that is no JSON") from None
        if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
            raise SignalRefused(Refused.MALFORMED, "packet that holds no fields of text")
        return cls.from_fields(fields, key, now=now)


@functools.lru_cache(maxsize=16)
def _signed(signal: Signal, key: bytes) -> Mapping[str, str]:
    """Once for all carriers of a signal."""
    payload = signal._payload()
    return payload | {"mac": _mac(payload, key)}


def _mac(payload: Mapping[str, str], key: bytes) -> str:
    # Length-prefixed, so that no two different payloads give the same bytes.
    parts = [f"{len(k)}:{k}{len(v)}:{v}" for k, v in sorted(payload.items())]
    return hmac.new(key, "".join(parts).encode(), hashlib.sha256).hexdigest()
