"""POST /v1/paypal/ipn, and what is done with a notification afterwards.

The request stores the bytes and answers; PayPal wants an empty 200 before it is asked. Afterwards a task asks
PayPal whether it sent them (`postback`), writes django-paypal's row, and only then is anything read out of it.
"""

from __future__ import annotations

import logging

from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse, QueryDict
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from paypal.standard.ipn.forms import PayPalIPNForm
from paypal.standard.ipn.models import PayPalIPN

from ledger.models import InboundEvent
from ledger.paypal.ipn.message import DEFAULT_CHARSET, IpnMessage, Malformed, read_message
from ledger.paypal.ipn.postback import is_paypals
from ledger.paypal.ipn.rail import CHANNEL
from ledger.paypal.store import audit_refused, store_event
from ledger.paypal.throttle import Throttle

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 65_536
# Each is stored, and PayPal is asked about it, before anybody knows whose it is. PayPal sends again what is refused.
taken = Throttle(times=600, seconds=60)
FORM = "application/x-www-form-urlencoded"


class NotForUs(Exception):
    """Refused before PayPal is asked. The message says why."""


@csrf_exempt
@require_POST
def paypal_ipn(request: HttpRequest) -> HttpResponse:
    """Stores what may be for us and answers with an empty 200; PayPal sends again what is answered otherwise."""
    if len(request.body) > MAX_BODY_BYTES:
        return HttpResponse(status=413)
    if request.content_type != FORM:
        audit_refused(channel=CHANNEL, reason="the content type is not that of a form", raw=request.body)
        return HttpResponse(status=415)
    try:
        message = read_message(request.body)
        check_recipient(message)
    except (Malformed, NotForUs) as problem:
        audit_refused(channel=CHANNEL, reason=str(problem), raw=request.body)
        return HttpResponse(status=400)
    if not taken.allows():
        return HttpResponse(status=503)
    store_event(channel=CHANNEL, raw=request.body, about=subject_of(message), verified=None)
    return HttpResponse(status=200)


def subject_of(message: IpnMessage) -> str:
    """What it speaks of: our purchase, the movement that undoes a payment, or the case."""
    if message.parent_txn_id:
        return message.txn_id[:127]
    return (message.reference or message.txn_id or message.case_id)[:127]


def check_recipient(message: IpnMessage) -> None:
    """Raises NotForUs for a payment to somebody else, and for sandbox money outside of the sandbox."""
    if message.is_test and settings.PAYPAL_MODE == "live":
        raise NotForUs("test_ipn on the live site")
    ours = settings.PAYPAL_RECEIVER.strip().lower()
    if not ours:
        raise NotForUs("PAYPAL_RECEIVER is not set, so no notification can be told to be ours")
    named = {
        message.fields[name].strip().lower()
        for name in ("business", "receiver_email", "receiver_id")
        if message.fields.get(name)
    }
    if ours not in named:
        raise NotForUs("the receiver is not PAYPAL_RECEIVER")


def vouch(event: InboundEvent) -> bool:
    """Asks PayPal once whether the notification is its own, and keeps the answer. Raises GatewayUnavailable."""
    if event.verified is not None:
        return event.verified
    raw = bytes(event.raw)
    genuine = is_paypals(raw)
    with transaction.atomic():
        if InboundEvent.objects.filter(pk=event.pk, verified__isnull=True).update(verified=genuine):
            _log(raw, genuine)
            if not genuine:
                audit_refused(channel=CHANNEL, reason="PayPal disowns it", raw=raw)
    return genuine


def _log(raw: bytes, genuine: bool) -> None:
    """django-paypal's row of it, for people to search in. Whatever does not fit its form stays in the query."""
    charset = dict(read_message(raw).fields).get("charset") or DEFAULT_CHARSET
    form = PayPalIPNForm(QueryDict(raw, encoding=charset))
    row = form.save(commit=False) if form.is_valid() else PayPalIPN()
    row.query = raw.decode("ascii")
    row.response = "VERIFIED" if genuine else "INVALID"
    if not genuine or not form.is_valid():
        row.set_flag("PayPal disowns it" if not genuine else "Some fields do not fit this table")
    row.save()
