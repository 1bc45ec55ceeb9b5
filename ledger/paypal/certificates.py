"""The certificate that a webhook was signed with: where it may come from, who must have issued it.

Whoever sends a webhook names the address. So it is only asked when it is one of PayPal's own, without
redirects, within bounds of time and size, and what it gives counts only when a root that we trust vouches
for it under PayPal's name.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import certifi
import requests
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from django.conf import settings

from ledger.paypal.throttle import Throttle

MAX_BYTES = 65_536
TIMEOUT_S = (3.05, 5)
KEPT = 8
KEEP_S = 12 * 3600
# An address that failed is not asked again for a while, whoever names it.
FAILED_KEEP_S = 60
# However many addresses of PayPal's host somebody makes up.
fetches = Throttle(times=20, seconds=60)
_HOSTS = {
    "live": frozenset({"api.paypal.com", "api-m.paypal.com"}),
    "sandbox": frozenset({"api.sandbox.paypal.com", "api-m.sandbox.paypal.com"}),
}
_PATH = "/v1/notifications/certs/"
_NAMES = {
    "live": ("messageverificationcerts.paypal.com",),
    "sandbox": ("messageverificationcerts.sandbox.paypal.com", "messageverificationcerts.paypal.com"),
    "stub": ("messageverificationcerts.stub.invalid",),
}


class CertificateRefused(Exception):
    """This certificate, or its address, is nobody we trust. Final."""


class CertificateUnavailable(Exception):
    """It could not be fetched, or its issuer is missing: nothing is known about the signature."""


def signing_key(url: str) -> RSAPublicKey:
    """The key of the certificate at `url`. Raises CertificateRefused and CertificateUnavailable."""
    check_address(url)
    return _cache.get(url)


def check_address(url: str) -> None:
    """Raises CertificateRefused unless the address is one of PayPal's (in mode stub: the stub's)."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise CertificateRefused("the certificate's address is malformed") from None
    if (
        not parts.path.startswith(_PATH)
        or ".." in parts.path
        or parts.username
        or parts.fragment
        or parts.query
    ):
        raise CertificateRefused("the certificate's address is not that of a PayPal certificate")
    if settings.PAYPAL_MODE == "stub":
        stub = urlsplit(settings.PAYPAL_STUB_URL)
        if (parts.scheme, parts.hostname, port) != (stub.scheme, stub.hostname, stub.port):
            raise CertificateRefused("the certificate is not on the stand-in's host")
        return
    if (
        parts.scheme != "https"
        or parts.hostname not in _HOSTS[settings.PAYPAL_MODE]
        or port not in {None, 443}
    ):
        raise CertificateRefused("the certificate is not on a host of PayPal")


class _Cache:
    """The last few keys by address, and for a moment the failures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[float, RSAPublicKey | Exception]] = OrderedDict()

    def get(self, url: str) -> RSAPublicKey:
        key = (settings.PAYPAL_MODE, url)
        with self._lock:
            until, found = self._kept.get(key, (0.0, None))
        if found is None or until <= time.monotonic():
            try:
                found, seconds = _checked(_fetch(url))
            except (CertificateRefused, CertificateUnavailable) as failure:
                found, seconds = failure, FAILED_KEEP_S
            self._keep(key, found, seconds)
        if isinstance(found, Exception):
            raise type(found)(*found.args)
        return found

    def _keep(self, key: tuple[str, str], found: RSAPublicKey | Exception, seconds: float) -> None:
        with self._lock:
            self._kept[key] = (time.monotonic() + seconds, found)
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


_cache = _Cache()
forget_certificates = _cache.clear


def _fetch(url: str) -> bytes:
    if not fetches.allows():
        raise CertificateUnavailable("too many certificates were asked for within a minute")
    try:
        with requests.get(url, timeout=TIMEOUT_S, allow_redirects=False, stream=True) as answer:
            if answer.status_code != 200:
                raise CertificateUnavailable(f"the certificate's address answered {answer.status_code}")
            body = b""
            for chunk in answer.iter_content(8192):
                body += chunk
                if len(body) > MAX_BYTES:
                    raise CertificateRefused("the certificate is too large")
            return body
    except requests.RequestException as error:
        raise CertificateUnavailable(f"no certificate ({type(error).__name__})") from None


def _checked(pem: bytes) -> tuple[RSAPublicKey, float]:
    """The first certificate's key after its chain was checked, and for how many seconds it may be kept."""
    try:
        leaf, *others = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise CertificateRefused("what is at the certificate's address is no certificate") from None
    now = datetime.now(UTC)
    if not leaf.not_valid_before_utc <= now <= leaf.not_valid_after_utc:
        raise CertificateRefused("the certificate is not valid today")
    problem: Exception | None = None
    for name in _NAMES[settings.PAYPAL_MODE]:
        verifier = PolicyBuilder().store(Store(_roots())).time(now).build_server_verifier(x509.DNSName(name))
        try:
            verifier.verify(leaf, others)
            break
        except VerificationError as error:
            problem = error
    else:
        if _issuer_is_missing(leaf, others):
            raise CertificateUnavailable("the certificate came without its issuer")
        raise CertificateRefused(f"the certificate's chain does not hold: {problem}"[:300])
    key = leaf.public_key()
    if not isinstance(key, RSAPublicKey):
        raise CertificateRefused("the certificate has no RSA key")
    return key, min(KEEP_S, (leaf.not_valid_after_utc - now).total_seconds())


def _issuer_is_missing(leaf: x509.Certificate, others: list[x509.Certificate]) -> bool:
    known = {certificate.subject for certificate in [*others, *_roots()]}
    return leaf.issuer not in known


def _roots() -> list[x509.Certificate]:
    """In mode stub the stand-in's own authority, else those that Mozilla trusts."""
    if settings.PAYPAL_MODE != "stub":
        return x509.load_pem_x509_certificates(Path(certifi.where()).read_bytes())
    try:
        return x509.load_pem_x509_certificates(Path(settings.PAYPAL_STUB_CA).read_bytes())
    except (OSError, ValueError, ssl.SSLError):
        raise CertificateUnavailable("the stand-in's authority is not in PAYPAL_STUB_CA") from None
