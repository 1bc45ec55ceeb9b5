"""Probes for machines: /healthz, /readyz, and the page and API over the health matrix."""

from __future__ import annotations

from functools import cache

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from apex.health.matrix import FAIL, PASS, Check, Matrix, Report


@cache
def health_matrix() -> Matrix:
    """The one matrix of this process. Checks are imported late: probes run before apps are needed."""
    from apex.health import checks

    return Matrix(
        {
            "database": checks.check_database,
            "migrations": checks.check_migrations,
            "cache": checks.check_cache,
            "broker": checks.check_broker,
            "workers": checks.check_workers,
            "gateway": checks.check_gateway,
            "engine": checks.check_engine,
            "paypal": checks.check_paypal,
            "providers": checks.check_providers,
            "nodes": checks.check_nodes,
            "ledger": checks.check_ledger,
        }
    )


@cache
def readiness() -> Matrix:
    """What this process itself needs before it may get requests."""
    from apex.health import checks

    needed: dict[str, Check] = {
        "database": checks.check_database,
        "migrations": checks.check_migrations,
        "cache": checks.check_cache,
    }
    return Matrix(needed)


@require_safe
@never_cache
def healthz(request: HttpRequest) -> HttpResponse:
    """The process runs. Touches nothing else, so that a database outage restarts nobody."""
    return JsonResponse({"status": PASS})


@require_safe
@never_cache
def readyz(request: HttpRequest) -> HttpResponse:
    return _as_json(readiness().poll())


def _as_json(report: Report) -> JsonResponse:
    response = JsonResponse(report.as_json(), status=503 if report.status == FAIL else 200)
    # The matrix logs what is wrong; Django need not log each poll as a server error too.
    response._has_been_logged = True  # type: ignore[attr-defined]
    return response


@require_safe
@never_cache
def status_page(request: HttpRequest) -> HttpResponse:
    """The matrix for people; htmx fetches the table again every few seconds."""
    template = "status/_table.html" if request.headers.get("HX-Request") else "status/page.html"
    return render(request, template, {"report": health_matrix().poll()})


@require_safe
@never_cache
def status_strip(request: HttpRequest) -> HttpResponse:
    return render(request, "status/_strip.html", {"report": health_matrix().poll()})
