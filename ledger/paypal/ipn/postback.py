"""Asks PayPal whether a notification is PayPal's: the very bytes back, and the word for yes is VERIFIED.

Where to ask is our setting's decision, never the message's (`test_ipn` would send us to the sandbox, where
everybody may buy for nothing). Never in the request that brought the notification.
"""

from __future__ import annotations

import requests
from django.conf import settings

from ledger.paypal.gateway import GatewayUnavailable

TIMEOUT_S = (3.05, 15)
_ADDRESSES = {
    "live": "https://ipnpb.paypal.com/cgi-bin/webscr",
    "sandbox": "https://ipnpb.sandbox.paypal.com/cgi-bin/webscr",
}


def is_paypals(raw: bytes) -> bool:
    """Raises GatewayUnavailable when PayPal says neither yes nor no."""
    address = _ADDRESSES.get(settings.PAYPAL_MODE, f"{settings.PAYPAL_STUB_URL}/cgi-bin/webscr")
    try:
        answer = requests.post(
            address,
            data=b"cmd=_notify-validate&" + raw,
            headers={"Content-Type": "application/x-www-form-urlencoded", "User-Agent": "Apex-IPN"},
            timeout=TIMEOUT_S,
            allow_redirects=False,
        )
    except requests.RequestException as error:
        raise GatewayUnavailable(f"PayPal did not answer ({type(error).__name__})") from None
    word = answer.content[:100].strip()
    if answer.status_code == 200 and word in {b"VERIFIED", b"INVALID"}:
        return word == b"VERIFIED"
    raise GatewayUnavailable(f"PayPal answered {answer.status_code} to the question for a notification")
