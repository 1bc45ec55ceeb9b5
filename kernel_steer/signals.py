"""The eviction signal: "node N, in its incarnation E, goes away". Signed, small, sent once per carrier.

The sure carrier is the Redis stream `steer:signals`. Idempotent by (node, epoch): a gateway that sees
the same signal twice does nothing the second time.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

logger = logging.getLogger(__name__)

STREAM = "steer:signals"
STREAM_MAX_ENTRIES = 10_000
_VERSION = "1"
# A notice can be about a deadline hours ahead, but the signal itself is sent when it is made.
MAX_AGE = timedelta(minutes=10)
# A reader that starts looks back this far: the signal may be older than the reader.
LOOK_BACK = timedelta(minutes=5)
_BLOCK_MS = 250
_BACKOFF_S = (0.05, 2.0)


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
            "deadline": self.deadline.astimezone(UTC).isoformat(timespec="microseconds")
            if self.deadline
            else "",
        }

    def to_fields(self, key: bytes) -> dict[str, str]:
        """The stream entry, signature included."""
        payload = self._payload()
        return payload | {"mac": _mac(payload, key)}

    @classmethod
    def from_fields(cls, fields: dict[str, str], key: bytes, *, now: datetime | None = None) -> Signal:
        """Checks the signature first and believes nothing before. Raises SignalRefused."""
        payload = {name: value for name, value in fields.items() if name != "mac"}
        if not hmac.compare_digest(_mac(payload, key).encode(), fields.get("mac", "").encode()):
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
        if signal.signal_at.tzinfo is None:
            raise SignalRefused("signal with a time that names no zone")
        if abs((now or datetime.now(UTC)) - signal.signal_at) > MAX_AGE:
            raise SignalRefused("signal older than ten minutes or from the future")
        return signal


def _mac(payload: dict[str, str], key: bytes) -> str:
    # Length-prefixed, so that no two different payloads give the same bytes.
    parts = [f"{len(k)}:{k}{len(v)}:{v}" for k, v in sorted(payload.items())]
    return hmac.new(key, "".join(parts).encode(), hashlib.sha256).hexdigest()


def connect(url: str) -> redis.Redis:
    """A client that notices a broken connection within seconds and leaves retrying to its caller."""
    return redis.Redis.from_url(
        url, socket_timeout=_BLOCK_MS / 1000 + 4, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
    )


def publish(client: redis.Redis, signal: Signal, key: bytes) -> None:
    """Appends the signal to the stream; whoever reads may see it twice. Raises redis.RedisError."""
    fields: dict[Any, Any] = dict(signal.to_fields(key))
    client.xadd(STREAM, fields, maxlen=STREAM_MAX_ENTRIES, approximate=True)


class SignalReader:
    """Reads the stream in a thread of the caller's, through outages of Redis.

    `after` is the stream id to start behind; None looks back LOOK_BACK. `last_id` is how far it got,
    `refused` counts what was not believed. A signal can come again after an outage, never not at all.
    """

    def __init__(self, client: redis.Redis, key: bytes, *, after: str | None = None) -> None:
        self._client = client
        self._key = key
        # A fixed id and never "$", which would skip what comes between two reads.
        self.last_id = after or f"{int((time.time() - LOOK_BACK.total_seconds()) * 1000)}-0"
        self.refused = 0

    def read(self, stop: threading.Event) -> Iterator[Signal]:
        """Yields verified signals until `stop` is set; notices `stop` within a moment."""
        delay_s = _BACKOFF_S[0]
        while not stop.is_set():
            try:
                answer: Any = self._client.xread({STREAM: self.last_id}, count=100, block=_BLOCK_MS)
            except (redis.RedisError, OSError) as error:
                logger.warning("signal stream unreachable (%s), trying again", type(error).__name__)
                self._client.close()
                stop.wait(delay_s)
                delay_s = min(delay_s * 2, _BACKOFF_S[1])
                continue
            delay_s = _BACKOFF_S[0]
            for entry_id, fields in _entries(answer):
                self.last_id = entry_id
                try:
                    signal = Signal.from_fields(fields, self._key)
                except SignalRefused as refusal:
                    self.refused += 1
                    logger.warning("refused an entry of the signal stream: %s", refusal)
                    continue
                yield signal


def _entries(answer: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Id and fields per entry. Bytes that are no text become marks that no signature fits."""
    streams = answer.values() if isinstance(answer, dict) else [entries for _, entries in answer or []]
    for entries in streams:
        # The newer protocol puts one more list around the entries.
        flat = entries[0] if entries and isinstance(entries[0], list) else entries
        for entry_id, fields in flat:
            yield _text(entry_id), {_text(name): _text(value) for name, value in fields.items()}


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
