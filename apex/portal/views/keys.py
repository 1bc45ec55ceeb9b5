"""API keys of a customer: made, shown once, revoked."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods

from apex.portal.forms import NewKeyForm
from apex.portal.scope import for_customer
from brokerage.models import APIKey, Customer
from brokerage.services.keys import IssuedKey, issue_key, revoke_key


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def keys(request: HttpRequest, customer: Customer) -> HttpResponse:
    if request.method != "POST":
        return _page(request, customer, NewKeyForm(customer, initial={"project": request.GET.get("project")}))
    form = NewKeyForm(customer, request.POST)
    if not form.is_valid():
        return _page(request, customer, form, status=422)
    issued = issue_key(
        customer=customer,
        project=form.cleaned_data["project"],
        name=form.cleaned_data["name"],
        mode=APIKey.Mode(form.cleaned_data["mode"]),
        actor=request.user,  # type: ignore[arg-type]
    )
    # Shown in this very answer and stored nowhere, so there is no redirect that could carry it.
    return _page(request, customer, NewKeyForm(customer), issued=issued)


def _page(
    request: HttpRequest,
    customer: Customer,
    form: NewKeyForm,
    *,
    issued: IssuedKey | None = None,
    status: int = 200,
) -> HttpResponse:
    context = {
        "form": form,
        "issued": issued,
        "keys": customer.api_keys.select_related("project").order_by("revoked_at", "-created_at"),
    }
    return render(request, "portal/keys.html", context, status=status)


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def revoke(request: HttpRequest, customer: Customer, key_id: UUID) -> HttpResponse:
    key = get_object_or_404(APIKey, pk=key_id, customer=customer)
    if request.method != "POST":
        return render(request, "portal/revoke_key.html", {"key": key})
    if revoke_key(key=key, actor=request.user):  # type: ignore[arg-type]
        messages.success(request, f"“{key.name}” is revoked. Nothing can use it any more.")
    else:
        messages.info(request, f"“{key.name}” was revoked already.")
    return redirect("portal:keys")
