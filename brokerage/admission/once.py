"""Claims on Idempotency-Keys, and the answers that are kept under them: one row for all gateways.

In PostgreSQL, because it must not forget: who is charged twice does not care why. A claim is a lease by the
database's clock, renewed by the gateway that works on the answer; when it dies, the next repetition takes
the key over and is answered anew.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from datetime import timedelta

import psycopg

from brokerage.admission.database import AWAY, Connection, Pool, call
from brokerage.services.kept import KEPT_FOR
from kernel_steer.admission import OnceKey, Refusal
from kernel_steer.gateway.audience import in_flight
from kernel_steer.gateway.once import reused

logger = logging.getLogger(__name__)

LEASE = timedelta(seconds=15)
RENEW_S = 5.0
_BACKOFF_S = (0.1, 0.5, 1.0, 2.0)

# A row whose day is over is as good as none; one whose gateway died is taken over by the same request.
_CLAIM = """
INSERT INTO brokerage_keptanswer AS k
    (api_key_id, key, request_hash, request_id, lease_until, answer_bytes, created_at)
VALUES (%(api_key)s, %(key)s, %(hash)s, %(request_id)s, clock_timestamp() + %(lease)s, 0, clock_timestamp())
ON CONFLICT (api_key_id, key) DO UPDATE SET
    request_hash = EXCLUDED.request_hash, request_id = EXCLUDED.request_id, lease_until = EXCLUDED.lease_until,
    created_at = EXCLUDED.created_at, finished_at = NULL, answer = NULL, answer_bytes = 0
 WHERE k.request_id = EXCLUDED.request_id
    OR k.created_at < clock_timestamp() - %(kept_for)s
    OR k.finished_at IS NULL AND k.lease_until < clock_timestamp() AND k.request_hash = EXCLUDED.request_hash
RETURNING k.id
"""
_READ = """
SELECT request_hash, finished_at IS NOT NULL, answer,
       ceil(extract(epoch FROM lease_until - clock_timestamp()))::int
  FROM brokerage_keptanswer WHERE api_key_id = %(api_key)s AND key = %(key)s
"""
_KEEP = """
UPDATE brokerage_keptanswer SET answer = %s, answer_bytes = %s, finished_at = clock_timestamp()
 WHERE request_id = %s AND finished_at IS NULL
"""
_FORGET = "DELETE FROM brokerage_keptanswer WHERE request_id = %s AND finished_at IS NULL"
_RENEW = """
UPDATE brokerage_keptanswer SET lease_until = clock_timestamp() + %s
 WHERE request_id = ANY (%s) AND finished_at IS NULL
"""


class OnceStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._open: set[uuid.UUID] = set()
        self._renewer: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._renewer = asyncio.create_task(self._renew_forever(), name="once-renewer")

    async def stop(self) -> None:
        """What is still open is free when its lease is over."""
        if self._renewer is not None:
            self._renewer.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewer

    async def begin(self, once: OnceKey, request_id: str) -> bytes | None:
        """See Admission.begin_once."""
        parameters = {
            "api_key": once.key_id,
            "key": once.key,
            "hash": once.fingerprint,
            "request_id": request_id,
            "lease": LEASE,
            "kept_for": KEPT_FOR,
        }

        async def claim(connection: Connection) -> tuple[bytes, bool, bytes | None, int] | None:
            while True:
                if await (await connection.execute(_CLAIM, parameters)).fetchone():
                    return None
                cursor = await connection.execute(_READ, parameters)
                if (row := await cursor.fetchone()) is not None:  # None: it was freed in between
                    return (bytes(row[0]), row[1], row[2], row[3])

        try:
            found = await call(self._pool, claim)
        except AWAY:
            raise Refusal(
                503,
                "service_unavailable",
                "The Idempotency-Key cannot be checked at the moment. Nothing was done; try again.",
                retry_after_s=2,
            ) from None
        if found is None:
            self._open.add(uuid.UUID(request_id))
            return None
        return _kept(once, *found)

    async def keep(self, request_id: str, answer: bytes | None) -> None:
        """Tries until it is stored; the lease is renewed as long."""
        await self._persist(_KEEP, request_id, answer, len(answer or b""), uuid.UUID(request_id))

    async def forget(self, request_id: str) -> None:
        await self._persist(_FORGET, request_id, uuid.UUID(request_id))

    async def _persist(self, statement: str, request_id: str, *parameters: object) -> None:
        attempt = 0
        while True:
            try:
                await call(self._pool, lambda connection: connection.execute(statement, parameters))  # type: ignore[arg-type]
                break
            except AWAY as error:
                if attempt == 0:
                    logger.warning("answer %s is not stored yet: %s", request_id, error)
                await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
                attempt += 1
        self._open.discard(uuid.UUID(request_id))

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if self._open:
                try:
                    await self.renew()
                except (*AWAY, psycopg.Error) as error:
                    logger.warning("claims of %d Idempotency-Keys not renewed: %s", len(self._open), error)

    async def renew(self) -> None:
        renewed = [LEASE, list(self._open)]
        await call(self._pool, lambda connection: connection.execute(_RENEW, renewed))


def _kept(
    once: OnceKey, request_hash: bytes, finished: bool, answer: bytes | None, lease_left_s: int
) -> bytes:
    if request_hash != once.fingerprint:
        raise reused()
    if not finished:
        message = "A request with this Idempotency-Key is under way. Ask again with the same key."
        raise in_flight(message, max(1, lease_left_s))
    if answer is None:
        raise Refusal(
            409,
            "idempotency_answer_not_kept",
            "This request was answered and charged; its answer was too long to be kept."
            " To have it made again, take a new Idempotency-Key.",
        )
    return answer
