"""POST /v1/webhooks/paypal."""

from __future__ import annotations

import logging

from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from ledger.paypal.events import WEBHOOK, note_webhook
from ledger.paypal.signature import Forged, Undecided
from ledger.paypal.store import audit_refused

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 65_536


@csrf_exempt
@require_POST
def paypal_webhook(request: HttpRequest) -> HttpResponse:
    """200 for what PayPal signed, whether it means anything to us or not: PayPal repeats anything else.

    400 for what PayPal did not sign; 503 while that cannot be told.
    """
    if len(request.body) > MAX_BODY_BYTES:
        return HttpResponse(status=413)
    try:
        note_webhook(raw=request.body, headers=dict(request.headers))
    except Forged as reason:
        audit_refused(channel=WEBHOOK, reason=str(reason), raw=request.body)
        return HttpResponse(status=400)
    except Undecided as reason:
        logger.error("a webhook could not be checked, PayPal sends it again: %s", reason)
        return HttpResponse(status=503)
    return HttpResponse(status=200)
