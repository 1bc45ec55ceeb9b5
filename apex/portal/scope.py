"""For whom a signed-in person acts. The customer always comes from a membership, never from an id in a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from brokerage.models import Customer
from brokerage.services.topping_up import awaiting_approval, open_notice

_SESSION_KEY = "customer"
P = ParamSpec("P")


def customers_of(request: HttpRequest) -> list[Customer]:
    """Asked once for each request: the view and the navigation both need it."""
    if not hasattr(request, "_customers"):
        assert request.user.pk is not None
        mine = Customer.objects.filter(members__user_id=request.user.pk).order_by("name", "pk")
        request._customers = list(mine)  # type: ignore[attr-defined]
    return request._customers  # type: ignore[attr-defined]


def current_customer(request: HttpRequest) -> Customer | None:
    """The customer that the person switched to, else the first of theirs, else None."""
    mine = customers_of(request)
    chosen = request.session.get(_SESSION_KEY)
    return next((customer for customer in mine if str(customer.pk) == chosen), mine[0] if mine else None)


def switch_customer(request: HttpRequest, customer_id: UUID) -> bool:
    """False when the person is no member of that customer; nothing changes then."""
    if customer_id not in {customer.pk for customer in customers_of(request)}:
        return False
    request.session[_SESSION_KEY] = str(customer_id)
    return True


def for_customer(
    view: Callable[Concatenate[HttpRequest, Customer, P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    """Signs the person in first and hands the view their customer; without one, a page that says what to do."""

    @wraps(view)
    def inner(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        customer = current_customer(request)
        if customer is None:
            return render(request, "portal/no_customer.html")
        return view(request, customer, *args, **kwargs)

    return login_required(inner)


def portal_context(request: HttpRequest) -> dict[str, Any]:
    """Context processor: what the portal's navigation shows. Asks the database only on portal pages."""
    if not request.path_info.startswith("/portal/") or not request.user.is_authenticated:
        return {}
    customer = current_customer(request)
    shown: dict[str, Any] = {"customer": customer, "customers": customers_of(request)}
    if customer is not None:
        shown["low_balance"] = open_notice(customer)
        shown["prepared_top_up"] = awaiting_approval(customer)
    return shown
