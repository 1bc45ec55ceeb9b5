"""Buying credits: form, PayPal, the way back, and the wait until the money is there."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_safe
from djmoney.money import Money

from apex.portal.forms import BuyCreditForm
from apex.portal.purchases import PurchaseFailed, start_purchase
from apex.portal.scope import for_customer
from apex.portal.selectors import credit_by_kind, top_ups_of
from brokerage.models import Customer
from ledger.errors import IdempotencyConflict
from ledger.models import TopUp
from ledger.paypal.events import note_return
from ledger.selectors import wallet


def _payment_sites() -> list[str]:
    """A browser checks form-action for the redirect after a form too, so PayPal's address must be in it."""
    if settings.PAYPAL_MODE == "stub":
        parts = urlsplit(settings.PAYPAL_STUB_URL)
        return [f"{parts.scheme}://{parts.netloc}"]
    return [
        "https://www.sandbox.paypal.com" if settings.PAYPAL_MODE == "sandbox" else "https://www.paypal.com"
    ]


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def buy(request: HttpRequest, customer: Customer) -> HttpResponse:
    if request.method != "POST":
        return _form(request, customer, BuyCreditForm(initial={"token": uuid.uuid4()}))
    form = BuyCreditForm(request.POST)
    if not form.is_valid():
        return _form(request, customer, form, status=422)
    try:
        top_up = start_purchase(
            customer=customer,
            amount=Money(form.cleaned_data["amount"], customer.currency),
            actor=f"user:{request.user.get_username()}",
            key=f"portal:{customer.pk}:{form.cleaned_data['token']}",
        )
    except PurchaseFailed as failure:
        # The same form with the same token: trying again goes on where this try stopped.
        return _form(request, customer, form, problem=str(failure), status=502)
    except IdempotencyConflict:
        # The amount was changed after going back from PayPal: that is another purchase.
        form = BuyCreditForm(initial={"amount": form.cleaned_data["amount"], "token": uuid.uuid4()})
        return _form(
            request, customer, form, problem="You changed the amount. Send it again to buy that.", status=409
        )
    if top_up.state != TopUp.State.APPROVING:  # sent again after it was paid
        return redirect("portal:top-up", top_up.public_id)
    return redirect(top_up.approve_url)


def _form(request: HttpRequest, customer: Customer, form: BuyCreditForm, **more: Any) -> HttpResponse:
    status = more.pop("status", 200)
    unfinished = top_ups_of(customer).filter(state__in=TopUp.UNFINISHED)[:5]
    purse = wallet(customer.wallet_code)
    context = {
        "form": form,
        "wallet": purse,
        "credit": credit_by_kind(purse),
        "unfinished": unfinished,
    } | more
    response = render(request, "portal/credits.html", context, status=status)
    # What the decorator csp_update does, here because the address is a setting that tests change.
    response._csp_update = {"form-action": _payment_sites()}  # type: ignore[attr-defined]
    return response


@require_safe
@for_customer
def paid(request: HttpRequest, customer: Customer) -> HttpResponse:
    """Where PayPal sends the payer back to. It credits nothing: it asks for the truth to be looked up."""
    top_up = get_object_or_404(top_ups_of(customer), order_id=request.GET.get("token", ""))
    note_return(order_id=str(top_up.order_id))
    return redirect("portal:top-up", top_up.public_id)


@require_safe
@for_customer
def cancelled(request: HttpRequest, customer: Customer) -> HttpResponse:
    return render(request, "portal/credits_cancel.html")


@require_safe
@for_customer
def progress(request: HttpRequest, customer: Customer, top_up_id: uuid.UUID) -> HttpResponse:
    """How a purchase stands; htmx asks again until it is decided."""
    top_up = top_ups_of(customer).filter(public_id=top_up_id).first()
    if top_up is None:
        raise Http404
    context = {"top_up": top_up, "wallet": wallet(customer.wallet_code)}
    template = "portal/_top_up.html" if request.headers.get("HX-Request") else "portal/top_up.html"
    return render(request, template, context)
