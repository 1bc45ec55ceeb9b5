"""POST /v1/webhooks/paypal."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from ledger.paypal.events import note_webhook

MAX_BODY_BYTES = 65_536


@csrf_exempt
@require_POST
def paypal_webhook(request: HttpRequest) -> HttpResponse:
    """Stores the body and answers 200, also to what it does not know: PayPal repeats anything else."""
    if len(request.body) > MAX_BODY_BYTES:
        return HttpResponse(status=413)
    note_webhook(raw=request.body, headers=dict(request.headers))
    return HttpResponse(status=200)
