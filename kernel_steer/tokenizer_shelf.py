"""Where gateways find the tokenizers of engines that do not hand theirs out: in Redis, under their digest.

A node worker puts it there, a gateway takes it and checks the digest, so it need not trust who put it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import redis

from kernel_steer.signals.stream import connect

log = logging.getLogger(__name__)
KEY = "steer:tokenizer:{}"
# Outlives a night without nodes; node workers renew it every minute.
KEEP_S = 86_400
BYTES_MAX = 128 << 20


def put(client: redis.Redis, tokenizer_id: str, path: Path) -> bool:
    """Puts the file there, or renews it; True when it had to be sent. Raises redis.RedisError, OSError."""
    key = KEY.format(tokenizer_id)
    if client.expire(key, KEEP_S):
        return False
    client.set(key, zlib.compress(path.read_bytes()), ex=KEEP_S)
    return True


def unpack(tokenizer_id: str, packed: bytes | None) -> bytes | None:
    """The file, or None when it is not there or not what its name says."""
    if packed is None:
        return None
    opening = zlib.decompressobj()
    try:
        raw = opening.decompress(packed, BYTES_MAX)
    except zlib.error:
        return None
    return raw if hashlib.sha256(raw).hexdigest() == tokenizer_id else None


def shelf_in(redis_url: str) -> Callable[[str], Awaitable[bytes | None]]:
    """For a TokenizerStore. What Redis does not give, for whatever reason, is not there."""

    def take(tokenizer_id: str) -> bytes | None:
        try:
            with connect(redis_url) as client:
                return unpack(tokenizer_id, client.get(KEY.format(tokenizer_id)))
        except (redis.RedisError, OSError) as error:
            log.warning("no tokenizer from Redis (%s)", type(error).__name__)
            return None

    return lambda tokenizer_id: asyncio.to_thread(take, tokenizer_id)
