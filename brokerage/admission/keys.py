"""Bearer keys, checked from memory; a new key is looked up once, a wrong one hardly ever."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from brokerage.admission.database import AWAY, Pool, call
from brokerage.admission.snapshot import KnownKey, Snapshot, find_key
from brokerage.services.keys import parse_key
from kernel_steer.admission import Refusal

# With PostgreSQL away a key that was good is believed this long.
TRUST_WITHOUT_DATABASE_S = 60.0
# A key cannot be guessed before it is made, so an unknown one stays unknown for a while.
UNKNOWN_TTL_S = 5.0
_UNKNOWN_MAX = 10_000
# Well-formed keys are easy to make up: their look-ups must leave connections for paying requests.
_LOOKUPS_AT_ONCE = 2


class KeyRing:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._snapshot = Snapshot()
        self._learned: dict[bytes, tuple[KnownKey, float]] = {}  # looked up, and when
        self._unknown: OrderedDict[bytes, float] = OrderedDict()  # digest -> until
        self._lookups = asyncio.Semaphore(_LOOKUPS_AT_ONCE)

    def update(self, snapshot: Snapshot) -> None:
        """What was looked up while the snapshot was being read may be too new to be in it."""
        self._learned = {d: (key, at) for d, (key, at) in self._learned.items() if at >= snapshot.loaded_at}
        for digest, (key, _) in self._learned.items():
            snapshot.learn(digest, key)
        self._snapshot = snapshot

    async def find(self, authorization: str | None) -> KnownKey:
        """Raises Refusal: 401 for whatever is no usable key, 503 when that cannot be told."""
        if not authorization:
            raise _refused("You did not provide an API key. Send it as 'Authorization: Bearer apx_...'.")
        scheme, _, text = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            raise _refused("Send the API key as 'Authorization: Bearer apx_...'.")
        parsed = parse_key(text.strip())
        if parsed is None:
            raise _refused("Malformed API key: it is mistyped or cut off.")
        key = self._snapshot.keys.get(parsed.digest)
        if key is None:
            key = await self._look_up(parsed.digest)
        elif self._snapshot.age_s() > TRUST_WITHOUT_DATABASE_S:
            raise _cannot_tell()
        if key is None or key.is_expired():
            raise _refused("Incorrect API key: unknown, expired or revoked.")
        return key

    async def _look_up(self, digest: bytes) -> KnownKey | None:
        if self._unknown.get(digest, 0.0) > time.monotonic():
            return None
        try:
            async with self._lookups:
                key = await call(self._pool, lambda connection: find_key(connection, digest))
        except AWAY:
            raise _cannot_tell() from None
        if key is None:
            self._unknown[digest] = time.monotonic() + UNKNOWN_TTL_S
            self._unknown.move_to_end(digest)
            if len(self._unknown) > _UNKNOWN_MAX:
                self._unknown.popitem(last=False)
            return None
        self._learned[digest] = (key, time.monotonic())
        self._snapshot.learn(digest, key)
        return key


def _refused(message: str) -> Refusal:
    return Refusal(401, "invalid_api_key", message)


def _cannot_tell() -> Refusal:
    return Refusal(
        503, "service_unavailable", "The API key cannot be checked at the moment; try again.", retry_after_s=2
    )
