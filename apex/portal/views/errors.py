"""Pages for what went wrong; under /v1 the same as problem+json."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from apex.api.problems import is_api, problem_response
from apex.middleware import request_id_of


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    return _page(request, 400, "The request is not well-formed.")


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    return _page(request, 403, "You may not do this.")


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    return _page(request, 404, "There is nothing at this address.")


def server_error(request: HttpRequest) -> HttpResponse:
    """Uses nothing that may be what is broken: no session, no database."""
    if is_api(request):
        return problem_response(request, 500, detail="Something broke on our side; it has been logged.")
    return HttpResponse(_render_500(request), status=500)


def _render_500(request: HttpRequest) -> str:
    from django.template.loader import render_to_string

    return render_to_string("500.html", {"request_id": request_id_of(request)})


def _page(request: HttpRequest, status: int, detail: str) -> HttpResponse:
    if is_api(request):
        return problem_response(request, status, detail=detail)
    return render(request, f"{status}.html", status=status)
