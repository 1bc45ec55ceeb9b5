"""Idempotency-Key: a request that is sent again is answered, and charged, once.

Same key, same body: while the answer is under way here, the repetition joins its audience; elsewhere it is
told to come back (409). Afterwards it gets the stored answer, byte for byte. Another body under a known
key is refused (422). Only an answer that reached its end is stored: what was refused or lost may be asked
again under the same key, as a new answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import orjson

from kernel_steer.admission import OnceKey, Refusal
from kernel_steer.gateway.audience import Audience

HEADER = "idempotency-key"
KEY_CHARS_MAX = 255
# Of one HTTP answer. An event of one token takes some 250 bytes.
KEEP_BYTES_MAX = 4 << 20
# How long an answer goes on after its client's connection broke, for the client to come back.
RETRY_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class AtWork:
    fingerprint: bytes
    audience: Audience


class Once:
    """The answers under a key that this gateway works on."""

    def __init__(self, patience_s: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._at_work: dict[tuple[str, str], AtWork] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, once: OnceKey, work: Callable[[Audience], Coroutine[None, None, None]]) -> Audience:
        """The audience of the request's answer. `work` makes the answer when nobody does yet; it must not
        raise, and ends when nothing more has to be remembered here. Raises Refusal 422."""
        name = (once.key_id, once.key)
        known = self._at_work.get(name)
        if known is not None:
            if known.fingerprint != once.fingerprint:
                raise reused()
            return known.audience
        audience = Audience(keep_bytes_max=KEEP_BYTES_MAX, patience_s=self._patience_s)
        self._at_work[name] = AtWork(once.fingerprint, audience)
        task = asyncio.get_running_loop().create_task(work(audience))
        self._tasks.add(task)

        def forget(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            del self._at_work[name]

        task.add_done_callback(forget)
        return audience

    async def ended(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


def once_key(header: str | None, *, key_id: str, path: str, body: bytes) -> OnceKey | None:
    """None without the header. The draft wants a quoted string, most clients send it bare. Raises Refusal 400."""
    if header is None:
        return None
    key = header.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not key or len(key) > KEY_CHARS_MAX or not key.isascii() or not key.isprintable():
        raise Refusal(
            400,
            "idempotency_key_malformed",
            f"Idempotency-Key must have 1 to {KEY_CHARS_MAX} printable ASCII characters.",
        )
    # The order of names and the spaces in JSON mean nothing.
    said = orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
    return OnceKey(key_id, key, hashlib.sha256(path.encode() + b"\0" + said).digest())


def reused() -> Refusal:
    return Refusal(
        422, "idempotency_key_reused", "This Idempotency-Key was used for another request. Take a new one."
    )


def replayed(answer: bytes) -> bytes:
    """The stored answer, marked as such."""
    status, rest = answer.split(b"\r\n", 1)
    return status + b"\r\nidempotent-replayed: true\r\n" + rest
