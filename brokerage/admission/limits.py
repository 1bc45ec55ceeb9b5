"""Rate limits of API keys: requests and tokens per minute, and answers at a time, over all gateways.

One atomic script in Redis for each decision (limit_scripts), so no number of gateways can overspend. A
limit protects the service and must not be what ends it: without Redis every request passes, and one log
line says so. Money is never guarded here, see sql/budgets.sql.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from brokerage.admission import limit_scripts
from kernel_steer.admission import Refusal

logger = logging.getLogger(__name__)

# An answer counts as open while its gateway says so: a killed gateway's answers are free after this long.
LEASE_S = 15.0
RENEW_S = 5.0
_PROBE_S = 1.0
_TIMEOUT_S = 1.0
_CALLS_AT_ONCE = 32
_AWAY = (redis.RedisError, OSError)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may do; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_answers: int | None = None

    def __bool__(self) -> bool:
        return any((self.requests_per_minute, self.tokens_per_minute, self.concurrent_answers))


NO_LIMITS = KeyLimits()


class RateLimits:
    """What `take` took is open until `settle` or `cancel`, each of which counts once per request id."""

    def __init__(self, redis_url: str) -> None:
        self._redis = Redis.from_url(
            redis_url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            # Once more, for a connection that a restart of Redis left dead. All scripts are idempotent.
            retry=Retry(NoBackoff(), 1),
            max_connections=_CALLS_AT_ONCE + 1,
        )
        self._take = self._redis.register_script(limit_scripts.TAKE)
        self._end = self._redis.register_script(limit_scripts.END)
        self._renew = self._redis.register_script(limit_scripts.RENEW)
        self._calls = asyncio.Semaphore(_CALLS_AT_ONCE)
        self._open: dict[str, str] = {}  # request id -> key id, as far as this gateway has them
        self._away = False
        self._renewer: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._renewer = asyncio.create_task(self._renew_forever(), name="limits-renewer")

    async def stop(self) -> None:
        """What is still open is free when its lease is over."""
        if self._renewer is not None:
            self._renewer.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewer
        await self._redis.aclose()

    # --- one request ------------------------------------------------------------------------------

    async def take(self, key_id: str, limits: KeyLimits, *, request_id: str, tokens_max: int) -> None:
        """Counts the request and reserves `tokens_max` (prompt and answer). Raises Refusal 429, and then
        nothing is taken.

        A request for more than a minute's tokens waits for a full bucket instead of for ever.
        """
        self._open[request_id] = key_id
        arguments = (
            request_id,
            limits.requests_per_minute or 0,
            limits.tokens_per_minute or 0,
            limits.concurrent_answers or 0,
            min(tokens_max, limits.tokens_per_minute or tokens_max),
            int(LEASE_S * 1000),
        )
        verdict = await self._run(self._take, key_id, *arguments)
        if verdict is None:
            return
        name, wait_ms = verdict
        if name:
            del self._open[request_id]
            raise _refusal(name.decode(), limits, retry_after_s=max(1, -(-wait_ms // 1000)))

    async def settle(self, request_id: str, key_id: str, *, tokens: int) -> None:
        """The answer has ended and took so many tokens, prompt and answer; the rest is given back."""
        await self._finish(request_id, key_id, tokens)

    async def cancel(self, request_id: str, key_id: str | None = None) -> None:
        """Nothing was done for the request: it does not count. Unknown requests are none to cancel."""
        await self._finish(request_id, key_id, limit_scripts.NOTHING_DONE)

    async def _finish(self, request_id: str, key_id: str | None, tokens: int) -> None:
        # First from memory: whatever happens to Redis now, the lease is not renewed any more.
        key_id = self._open.pop(request_id, key_id)
        if key_id is not None:
            await self._run(self._end, key_id, request_id, tokens)

    # --- all open ones ----------------------------------------------------------------------------

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_S if self._away else RENEW_S)
            if self._away:
                await self._probe()
            await self.renew()

    async def renew(self) -> None:
        """Extends the leases of what is open here; brings them back when Redis has lost them."""
        by_key: dict[str, list[str]] = defaultdict(list)
        for request_id, key_id in self._open.items():
            by_key[key_id].append(request_id)
        for key_id, request_ids in by_key.items():
            await self._run(self._renew, key_id, int(LEASE_S * 1000), *request_ids)
            for request_id in request_ids:
                if request_id not in self._open:  # ended meanwhile; which came first is not known
                    await self.cancel(request_id, key_id)

    # --- Redis ------------------------------------------------------------------------------------

    async def _run(self, script: Any, key_id: str, *arguments: object) -> Any:
        """The script's answer; None while Redis is away. Only the probe waits for one that is away."""
        async with self._calls:
            if self._away:
                return None
            try:
                return await script(keys=limit_scripts.keys_of(key_id), args=arguments)
            except _AWAY as error:
                if not self._away:
                    logger.warning("Redis is away, rate limits are off: %s: %s", type(error).__name__, error)
                self._away = True
                return None

    async def _probe(self) -> None:
        with suppress(*_AWAY):
            await self._redis.ping()
            self._away = False
            logger.info("Redis is back, rate limits are on again")


def _refusal(name: str, limits: KeyLimits, *, retry_after_s: int) -> Refusal:
    again = f"Try again in {retry_after_s} s."
    messages = {
        "requests": f"The limit of {limits.requests_per_minute} requests per minute of this API key is reached. {again}",
        "tokens": f"The limit of {limits.tokens_per_minute} tokens per minute of this API key leaves no room for"
        f" this request now. {again} A smaller max_tokens passes sooner.",
        "answers": f"The limit of {limits.concurrent_answers} answers at a time of this API key is reached."
        " Try again when one of them has ended.",
    }
    return Refusal(429, "rate_limit_exceeded", messages[name], retry_after_s=retry_after_s)
