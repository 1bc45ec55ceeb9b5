"""What happens when credits run low: the rule of a customer, set by its owners."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from apex.portal.forms import LowBalanceForm
from apex.portal.scope import for_customer
from brokerage.models import Customer, LowBalanceRule
from brokerage.services.topping_up import is_owner, set_low_balance_rule, settled_this_month
from ledger.selectors import wallet


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def low_balance(request: HttpRequest, customer: Customer) -> HttpResponse:
    assert isinstance(request.user, User)
    may_change = is_owner(customer=customer, user=request.user)
    if request.method != "POST":
        rule = LowBalanceRule.objects.filter(customer=customer).first()
        return _page(request, customer, LowBalanceForm(customer, rule), may_change=may_change)
    if not may_change:
        raise PermissionDenied
    form = LowBalanceForm(customer, None, request.POST)
    if form.is_valid():
        try:
            set_low_balance_rule(customer=customer, actor=request.user, **form.cleaned_data)
        except ValidationError as error:
            form.add_error(None, error)
    if form.errors:
        return _page(request, customer, form, may_change=True, status=422)
    messages.success(request, "Saved.")
    return redirect("portal:low-balance")


def _page(
    request: HttpRequest, customer: Customer, form: LowBalanceForm, *, may_change: bool, status: int = 200
) -> HttpResponse:
    context = {
        "form": form,
        "may_change": may_change,
        "wallet": wallet(customer.wallet_code),
        "settled": settled_this_month(customer),
    }
    return render(request, "portal/low_balance.html", context, status=status)
