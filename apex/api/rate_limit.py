"""Token buckets in Redis: one atomic script for each decision, so that no number of processes can overspend."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import redis
from django.conf import settings
from django.http import HttpRequest

log = logging.getLogger(__name__)

# The clock is the server's: web processes on several machines share one truth.
_TAKE = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local capacity, window_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'at_ms')
local tokens = tonumber(bucket[1]) or capacity
local at_ms = tonumber(bucket[2]) or now_ms
tokens = math.min(capacity, tokens + math.max(0, now_ms - at_ms) * capacity / window_ms)
local allowed = 0
if tokens >= 1 then
  tokens = tokens - 1
  allowed = 1
end
redis.call('HSET', KEYS[1], 'tokens', tostring(tokens), 'at_ms', now_ms)
redis.call('PEXPIRE', KEYS[1], window_ms)
local wait_ms = 0
if tokens < 1 then wait_ms = math.ceil((1 - tokens) * window_ms / capacity) end
return {allowed, math.floor(tokens), wait_ms, math.ceil((capacity - tokens) * window_ms / capacity)}
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `requests` in a burst, refilled evenly over `window_s` seconds."""

    name: str
    requests: int
    window_s: int


@dataclass(frozen=True, slots=True)
class Decision:
    """`wait_ms` until the next request can pass (0: now), `full_ms` until the bucket is full again."""

    limit: Limit
    allowed: bool
    remaining: int
    wait_ms: int
    full_ms: int

    @property
    def retry_after_s(self) -> int:
        return max(1, -(-self.wait_ms // 1000))

    def headers(self) -> dict[str, str]:
        """The draft's RateLimit fields, and the X- ones that most clients still read."""
        full_s = -(-self.full_ms // 1000)
        headers = {
            "RateLimit-Policy": f'"{self.limit.name}";q={self.limit.requests};w={self.limit.window_s}',
            "RateLimit": f'"{self.limit.name}";r={self.remaining};t={full_s}',
            "X-RateLimit-Limit": str(self.limit.requests),
            "X-RateLimit-Remaining": str(self.remaining),
            "X-RateLimit-Reset": str(full_s),
        }
        if not self.allowed:
            headers["Retry-After"] = str(self.retry_after_s)
        return headers


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=0.5, socket_connect_timeout=0.5)


def take(limit: Limit, caller: str) -> Decision:
    """Takes one token from the caller's bucket.

    Without Redis every request passes: a limit protects the service, it must not be what ends it.
    """
    try:
        key = f"apex:limit:{limit.name}:{caller}"
        allowed, remaining, wait_ms, full_ms = _client().eval(
            _TAKE, 1, key, limit.requests, limit.window_s * 1000
        )
    except redis.RedisError as error:
        log.warning("rate limit %s is off: %s", limit.name, type(error).__name__)
        return Decision(limit, True, limit.requests, 0, 0)
    return Decision(limit, bool(allowed), remaining, wait_ms, full_ms)


def client_ip(request: HttpRequest) -> str:
    """The address that spoke to us or, behind TRUSTED_PROXIES proxies, the one that spoke to the outermost.

    Entries further left in X-Forwarded-For are what the client itself claims and are never used.
    """
    proxies: int = settings.TRUSTED_PROXIES
    hops = [part.strip() for part in request.headers.get("X-Forwarded-For", "").split(",") if part.strip()]
    if proxies and hops:
        return hops[-min(proxies, len(hops))]
    return str(request.META.get("REMOTE_ADDR") or "unknown")
