"""API keys: made once, shown once, stored as a hash, revoked for ever.

`apx_live_` or `apx_test_`, then 32 random base62 characters (190 bits), then a CRC-32 of all before it
in 6 base62 characters. The checksum is no secret: it lets anyone tell a mistyped key from a wrong one
without asking a database, and lets secret scanners report a leaked key with certainty.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models.functions import Now

from brokerage.models import APIKey, Customer, Project
from brokerage.services.audit import record

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_RANDOM_CHARS = 32
_CHECKSUM_CHARS = 6
_SHAPE = re.compile(rf"apx_(live|test)_[0-9A-Za-z]{{{_RANDOM_CHARS + _CHECKSUM_CHARS}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """`plaintext` exists only here: whoever receives it must show it now or lose it."""

    key: APIKey
    plaintext: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A well-formed key; whether it exists and may be used is for the database to say."""

    mode: str
    digest: bytes  # SHA-256 of the whole key
    last4: str


def parse_key(text: str) -> ParsedKey | None:
    """None for anything that no `issue_key` ever made: wrong shape or wrong checksum."""
    match = _SHAPE.fullmatch(text)
    if match is None or text[-_CHECKSUM_CHARS:] != _checksum(text[:-_CHECKSUM_CHARS]):
        return None
    return ParsedKey(mode=match[1], digest=hashlib.sha256(text.encode()).digest(), last4=text[-4:])


def make_key(mode: APIKey.Mode) -> str:
    body = f"apx_{mode.value}_" + "".join(secrets.choice(BASE62) for _ in range(_RANDOM_CHARS))
    return body + _checksum(body)


def _checksum(body: str) -> str:
    number, digits = zlib.crc32(body.encode()), ""
    for _ in range(_CHECKSUM_CHARS):
        number, remainder = divmod(number, 62)
        digits = BASE62[remainder] + digits
    return digits


@transaction.atomic
def issue_key(
    *,
    customer: Customer,
    name: str,
    actor: User | None,
    mode: APIKey.Mode = APIKey.Mode.LIVE,
    project: Project | None = None,
) -> IssuedKey:
    """A key in that project for life; without one in the customer's default project.

    Raises ValidationError, keyed by field: an empty or too long name, an archived project, another customer's.
    """
    project = _locked(customer, project)
    plaintext = make_key(mode)
    parsed = parse_key(plaintext)
    assert parsed is not None
    key = APIKey(
        customer=customer,
        project=project,
        name=name.strip(),
        mode=mode,
        key_hash=parsed.digest,
        last4=parsed.last4,
        created_by=actor,
    )
    if not key.name:
        raise ValidationError({"name": "Give the key a name, so that you can tell it from others later."})
    key.clean_fields(exclude={"created_at"})
    key.save(force_insert=True)
    record(
        "api_key.issued",
        actor=actor,
        subject=key,
        customer=str(customer.pk),
        project=str(project.pk),
        name=key.name,
        mode=mode.value,
    )
    return IssuedKey(key, plaintext)


def _locked(customer: Customer, project: Project | None) -> Project:
    """So that it is not archived in the meantime."""
    mine = Project.objects.select_for_update(no_key=True).filter(customer=customer)
    found = mine.filter(pk=project.pk).first() if project else mine.get(is_default=True)
    if found is None:
        raise ValidationError({"project": "You have no such project."})
    if found.archived_at is not None:
        raise ValidationError({"project": f"The project “{found}” is archived: it takes no keys."})
    return found


@transaction.atomic
def revoke_key(*, key: APIKey, actor: User | None) -> bool:
    """True when this call revoked it, False when it was revoked already. Gateways follow within a second."""
    revoked = APIKey.objects.filter(pk=key.pk, revoked_at__isnull=True).update(revoked_at=Now())
    if revoked:
        record("api_key.revoked", actor=actor, subject=key, customer=str(key.customer_id), last4=key.last4)
    return bool(revoked)
