"""The sure carrier: the Redis stream `steer:signals`, read through outages of Redis."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kernel_steer.signals.message import Signal, SignalRefused

logger = logging.getLogger(__name__)

STREAM = "steer:signals"
STREAM_MAX_ENTRIES = 10_000
# A reader that starts looks back this far: the signal may be older than the reader.
LOOK_BACK = timedelta(minutes=5)
_BLOCK_MS = 250
_BACKOFF_S = (0.05, 2.0)


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

    def __init__(
        self,
        client: redis.Redis,
        key: bytes,
        *,
        after: str | None = None,
        on_refused: Callable[[SignalRefused], None] | None = None,
    ) -> None:
        self._client = client
        self._key = key
        self._on_refused = on_refused
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
                    if self._on_refused is not None:
                        self._on_refused(refusal)
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
