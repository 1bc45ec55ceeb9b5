"""The landing page with the application for the pilot."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.templatetags.static import static
from django.views.decorators.http import require_http_methods, require_safe

from apex.api.rate_limit import Limit, client_ip, take
from apex.portal.forms import PilotApplicationForm
from brokerage.services.customers import apply_for_pilot

_APPLICATIONS = Limit("apply", requests=10, window_s=3600)


@require_http_methods(["GET", "HEAD", "POST"])
def landing(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        return _apply(request)
    return render(request, "landing.html", {"form": PilotApplicationForm()})


def _apply(request: HttpRequest) -> HttpResponse:
    form = PilotApplicationForm(request.POST)
    if form.is_from_a_program:
        # Thanked like everybody, so that it learns nothing.
        return redirect("apply-thanks")
    if not form.is_valid():
        return render(request, "landing.html", {"form": form}, status=422)
    decision = take(_APPLICATIONS, client_ip(request))
    if not decision.allowed:
        form.add_error(None, "Too many applications from your address. Try again in an hour.")
        return render(request, "landing.html", {"form": form}, status=429)
    fields = {name: form.cleaned_data[name] for name in ("name", "email", "company", "use_case")}
    # An open application of the same address stays as it is; the page says so to everybody, so that
    # nobody learns who has applied.
    apply_for_pilot(**fields)
    return redirect("apply-thanks")


@require_safe
def apply_thanks(request: HttpRequest) -> HttpResponse:
    return render(request, "apply_thanks.html")


@require_safe
def favicon(request: HttpRequest) -> HttpResponse:
    """For pages that name no icon: those of the back office."""
    return redirect(static("apex.svg"))
