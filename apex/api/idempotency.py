"""A POST with an Idempotency-Key happens once, however often it is sent.

The rules of draft-ietf-httpapi-idempotency-key-header-07: same key and same request replay the stored
answer; same key with another request is refused (422); a second one while the first is at work is told
so (409). Only a success is stored: a refused request has done nothing, so repeating it is safe.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

from django.db import IntegrityError, transaction
from django.db.models.functions import Now
from django.utils import timezone
from rest_framework.request import Request
from rest_framework.response import Response

from apex.api.callers import Caller
from apex.api.problems import Problem
from apex.models import IdempotentRequest

HEADER = "Idempotency-Key"
KEY_REUSED = "idempotency-key-reused"
MAX_KEY_CHARS = 255
# Longer than any request may take: a row locked for longer belongs to a process that died.
ABANDONED_AFTER = timedelta(seconds=60)
KEPT_FOR = timedelta(hours=24)


def run_once(
    request: Request,
    work: Callable[[str], Response],
    *,
    required: bool = True,
    in_transaction: bool = False,
    redact: Callable[[dict[str, object]], dict[str, object]] | None = None,
) -> Response:
    """Runs `work(key)` under the request's key and stores its answer.

    `in_transaction` commits the work and its stored answer together; without it, work that was cut off
    by a crash runs again with the same key, so it must be idempotent by that key itself. `redact` makes
    what is stored from what is answered.
    """
    key = _key_of(request)
    if key is None:
        if required:
            raise Problem(
                400,
                f"This request needs the header {HEADER}, for example a new UUID for each purchase.",
                code="idempotency-key-missing",
            )
        return work("")
    row = _claim(request, key)
    if row.status is not None:
        return Response(row.response, status=row.status, headers={"Idempotent-Replayed": "true"})
    try:
        boundary: AbstractContextManager[object] = transaction.atomic() if in_transaction else nullcontext()
        with boundary:
            response = work(key)
            stored = redact(dict(response.data)) if redact else response.data
            IdempotentRequest.objects.filter(pk=row.pk).update(status=response.status_code, response=stored)
    except BaseException:
        IdempotentRequest.objects.filter(pk=row.pk, status__isnull=True).delete()
        raise
    return response


def hash_of(key: str) -> str:
    """For services whose own keys are shorter than what a client may send."""
    return hashlib.sha256(key.encode()).hexdigest()


def forget_old_requests() -> int:
    """Deletes the keys of yesterday; returns how many."""
    deleted, _ = IdempotentRequest.objects.filter(created_at__lt=timezone.now() - KEPT_FOR).delete()
    return deleted


def _key_of(request: Request) -> str | None:
    """The draft says a quoted string; most clients send it bare. Both are taken."""
    header = request.headers.get(HEADER)
    if header is None:
        return None
    key = header.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not key or len(key) > MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise Problem(
            400,
            f"{HEADER} must have 1 to {MAX_KEY_CHARS} printable characters.",
            code="idempotency-key-malformed",
        )
    return key


def _claim(request: Request, key: str) -> IdempotentRequest:
    """Our new row, or the finished one of an earlier request. Raises Problem for a conflict."""
    assert isinstance(request.auth, Caller)
    where = {"scope": request.auth.scope, "method": request.method, "path": request.path, "key": key}
    fingerprint = _fingerprint(request)
    try:
        with transaction.atomic():
            return IdempotentRequest.objects.create(**where, request_hash=fingerprint)
    except IntegrityError:
        row = IdempotentRequest.objects.filter(**where).first()
    if row is None:  # the first one failed just now and took its row away
        raise Problem(
            409, "A request with this key has just failed. Send it again.", code="idempotency-in-flight"
        )
    if bytes(row.request_hash) != fingerprint:
        raise Problem(422, f"This {HEADER} was used for another request. Take a new one.", code=KEY_REUSED)
    if row.status is not None:
        return row
    dead = IdempotentRequest.objects.filter(
        pk=row.pk,
        status__isnull=True,
        locked_at=row.locked_at,
        locked_at__lt=timezone.now() - ABANDONED_AFTER,
    )
    if dead.update(locked_at=Now()):
        return row
    raise Problem(
        409,
        "A request with this key is still at work. Ask again in a moment.",
        code="idempotency-in-flight",
        headers={"Retry-After": "1"},
    )


def _fingerprint(request: Request) -> bytes:
    body = json.dumps(request.data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode()).digest()
