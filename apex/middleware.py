"""What every response of the web process has in common: probes, request ids, cache rules, metrics."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.utils.cache import add_never_cache_headers

from apex import metrics
from apex.health.views import healthz, readyz

Handler = Callable[[HttpRequest], HttpResponse]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PROBES: dict[str, Handler] = {"/healthz": healthz, "/readyz": readyz}


class ProbeMiddleware:
    """Answers probes before anything else: load balancers call by address and over plain HTTP, which
    the host check and the redirect to HTTPS would refuse."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        probe = _PROBES.get(request.path_info)
        return probe(request) if probe else self.get_response(request)


class RequestIdMiddleware:
    """Takes a well-formed X-Request-ID of the caller, else makes one, and returns it with the answer."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        given = request.headers.get("X-Request-ID", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        request.request_id = request_id  # type: ignore[attr-defined]
        started = time.perf_counter()
        response = self.get_response(request)
        metrics.count_request(request, response, time.perf_counter() - started)
        response.headers["X-Request-ID"] = request_id
        return response


class PrivatePagesMiddleware:
    """Nothing that was made for a signed-in person or a key may be kept by a cache on the way."""

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        # `_cached_user` is there only if the view asked who is calling: no look-up for public pages.
        user = getattr(request, "_cached_user", None)
        if (
            "Authorization" in request.headers
            or request.path_info.startswith("/portal/")
            or (user is not None and user.is_authenticated)
        ):
            response.headers["Cache-Control"] = "private, no-store"
        elif "Set-Cookie" in response.headers or response.cookies:
            add_never_cache_headers(response)
        return response


def request_id_of(request: HttpRequest) -> str:
    """Empty only where an error came up before the middleware ran."""
    return getattr(request, "request_id", "")
