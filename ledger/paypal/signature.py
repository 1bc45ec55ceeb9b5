"""Is this webhook PayPal's? Checked here, on the very bytes: no call to PayPal for each event.

The signature is RSA with SHA-256 over `transmission id|transmission time|webhook id|CRC-32 of the body`, as
PayPal's guide "Integrate webhooks" has it. Where our own check cannot be made (PayPal's certificate does not
come, or without its issuer) PayPal is asked instead, which its guide names as the other way; a signature that
is wrong is never asked about.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA256
from django.conf import settings

from ledger.paypal.api import ask_more
from ledger.paypal.certificates import CertificateRefused, CertificateUnavailable, signing_key
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable
from ledger.paypal.throttle import Throttle

# PayPal repeats an event for three days.
OLDEST = timedelta(days=4)
AHEAD = timedelta(minutes=5)
ALGORITHM = "SHA256withRSA"
# Anybody may send us what we cannot check ourselves.
questions = Throttle(times=20, seconds=60)


class Forged(Exception):
    """Not PayPal's, or not for us, or out of its time. The message says why."""


class Undecided(Exception):
    """Neither we nor PayPal could tell. PayPal sends it again."""


def check_signature(*, raw: bytes, headers: Mapping[str, str]) -> None:
    """Returns when PayPal signed these bytes for our webhook. Raises Forged and Undecided."""
    if not settings.PAYPAL_WEBHOOK_ID:
        raise Undecided("PAYPAL_WEBHOOK_ID is not set, so no webhook can be checked")
    given = {name.lower(): value for name, value in headers.items()}
    sent_id, sent_at, signature, cert_url, algorithm = (
        given.get(f"paypal-{name}", "")
        for name in ("transmission-id", "transmission-time", "transmission-sig", "cert-url", "auth-algo")
    )
    if not (sent_id and sent_at and signature and cert_url and algorithm):
        raise Forged("the headers of a signature are missing")
    if algorithm.lower() != ALGORITHM.lower():
        raise Forged("the algorithm is not SHA256withRSA")
    _check_time(sent_at)
    signed = f"{sent_id}|{sent_at}|{settings.PAYPAL_WEBHOOK_ID}|{zlib.crc32(raw)}".encode()
    try:
        signature_bytes = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        raise Forged("the signature is not base64") from None
    try:
        signing_key(cert_url).verify(signature_bytes, signed, PKCS1v15(), SHA256())
    except InvalidSignature:
        raise Forged("the signature does not fit the body") from None
    except CertificateRefused as refusal:
        raise Forged(str(refusal)) from None
    except CertificateUnavailable as problem:
        _ask_paypal(raw, given, str(problem))


def _check_time(sent_at: str) -> None:
    try:
        moment = datetime.fromisoformat(sent_at)
    except ValueError:
        raise Forged("the transmission time is malformed") from None
    if moment.tzinfo is None:
        raise Forged("the transmission time has no zone")
    age = datetime.now(UTC) - moment
    if age > OLDEST or age < -AHEAD:
        raise Forged("the transmission time is outside of the window")


def _ask_paypal(raw: bytes, given: Mapping[str, str], why: str) -> None:
    if not questions.allows():
        raise Undecided(f"{why}; PayPal is asked {questions.times} times a minute at most")
    try:
        event = json.loads(raw)
    except ValueError:
        raise Forged("the body is not JSON") from None
    question = {
        name: given[f"paypal-{name.replace('_', '-')}"]
        for name in ("transmission_id", "transmission_time", "transmission_sig", "cert_url", "auth_algo")
    } | {"webhook_id": settings.PAYPAL_WEBHOOK_ID, "webhook_event": event}
    try:
        answer = ask_more(lambda api: api.verify_webhook_signature(question))
    except GatewayRefused as refusal:
        raise Forged(f"PayPal refused to check it: {refusal.issue}") from None
    except GatewayUnavailable:
        raise Undecided(why) from None
    if not isinstance(answer, dict) or answer.get("verification_status") != "SUCCESS":
        raise Forged("PayPal disowns it")
