"""What a customer sees first, and the two long lists behind it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from apex.portal.forms import SwitchCustomerForm
from apex.portal.paging import page_of
from apex.portal.scope import for_customer, switch_customer
from apex.portal.selectors import UsageDay, credit_by_kind, example_model, first_steps, usage_by_day, usage_of
from apex.portal.statements import as_download, statement_months, statement_of
from brokerage.models import Customer
from ledger.selectors import entries_page, wallet


@require_safe
@for_customer
def home(request: HttpRequest, customer: Customer) -> HttpResponse:
    days = usage_by_day(customer)
    credit = wallet(customer.wallet_code)
    context = {
        "wallet": credit,
        "credit": credit_by_kind(credit),
        "days": days,
        "plot": plot_of(days, customer.currency),
        "used": any(day.answers for day in days),
        "recent": usage_of(customer)[:5],
        "steps": first_steps(customer, credit),
        "model_name": example_model(),
        "gateway_url": settings.GATEWAY_PUBLIC_URL,
    }
    return render(request, "portal/home.html", context)


def plot_of(days: list[UsageDay], currency: str) -> dict[str, Any]:
    """Data for the plot: unix seconds, tokens, cost. A plot may round; the table below it is exact."""
    return {
        "days": [int(day.starts_at.timestamp()) for day in days],
        "tokens": [day.tokens for day in days],
        "cost": [float(day.cost) for day in days],
        "currency": currency,
    }


@require_safe
@for_customer
def usage(request: HttpRequest, customer: Customer) -> HttpResponse:
    try:
        charge = UUID(request.GET["charge"]) if "charge" in request.GET else None
    except ValueError as error:
        raise Http404 from error
    page = page_of(request, usage_of(customer, charge=charge), order="-finished_at")
    return render(request, "portal/usage.html", {"page": page, "charge": charge})


@require_safe
@for_customer
def statement(request: HttpRequest, customer: Customer) -> HttpResponse:
    credit = wallet(customer.wallet_code)
    before = request.GET.get("before")
    if before is not None and not (before.isascii() and before.isdigit() and len(before) <= 18):
        raise Http404
    page = entries_page(account_id=credit.account_id, before=int(before) if before else None, limit=25)
    months = statement_months(customer)
    context = {
        "page": page,
        "wallet": credit,
        "credit": credit_by_kind(credit),
        "before": before,
        "months": months,
    }
    return render(request, "portal/statement.html", context)


@require_safe
@for_customer
def statement_file(request: HttpRequest, customer: Customer, month: str, extension: str) -> HttpResponse:
    try:
        found = statement_of(customer, month)
    except ValueError as error:
        raise Http404 from error
    return as_download(found, extension)


@require_POST
@for_customer
def switch(request: HttpRequest, customer: Customer) -> HttpResponse:
    form = SwitchCustomerForm(request.POST)
    # An unknown customer and somebody else's look the same.
    if not form.is_valid() or not switch_customer(request, form.cleaned_data["customer"]):
        raise Http404
    return redirect("portal:home")
