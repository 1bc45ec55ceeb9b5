"""Other people's keys at rest: sealed with keys derived from SECRET_KEY, and from SECRET_KEY_FALLBACKS to open.

A copy of the database alone opens nothing. SECRET_KEY is changed as Django has it: the old one becomes a
fallback until every secret was sealed anew.
"""

from __future__ import annotations

import base64

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.utils.encoding import force_bytes

_PURPOSE = b"apex sealed secrets v1"


class SecretUnreadable(ValueError):
    """It was sealed under a SECRET_KEY that is not known any more."""


def seal(secret: str) -> str:
    return _keys().encrypt(secret.encode()).decode()


def unseal(sealed: str) -> str:
    """Raises SecretUnreadable."""
    try:
        return _keys().decrypt(sealed.encode()).decode()
    except InvalidToken:
        raise SecretUnreadable("sealed under another SECRET_KEY: enter it again") from None


def _keys() -> MultiFernet:
    return MultiFernet(
        [_fernet(force_bytes(key)) for key in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)]
    )


def _fernet(secret_key: bytes) -> Fernet:
    key = HKDF(algorithm=SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret_key)
    return Fernet(base64.urlsafe_b64encode(key))
