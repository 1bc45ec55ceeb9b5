"""Prometheus metrics: what this process served, and the state of the business read at scrape time."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from brokerage.models import Node, UsageEvent

_requests = Counter("apex_http_requests_total", "Requests served.", ["method", "view", "status"])
_seconds = Histogram("apex_http_request_seconds", "Time to the response object, in seconds.", ["view"])
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def count_request(request: HttpRequest, response: HttpResponse, seconds: float) -> None:
    # Labels come from our own tables, never from the request: a scanner must not fill the memory.
    match = request.resolver_match
    view = match.view_name if match and match.view_name else "unmatched"
    method = request.method if request.method in _METHODS else "other"
    _requests.labels(method, view, str(response.status_code)).inc()
    _seconds.labels(view).observe(seconds)


class _BusinessCollector:
    """Read at scrape time, so the figures are the same whichever process answers."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        nodes = GaugeMetricFamily("apex_nodes", "Nodes by state.", labels=["state"])
        counts = dict(Node.objects.order_by().values_list("state").annotate(Count("pk")))
        for state in Node.State.values:
            nodes.add_metric([state], counts.get(state, 0))
        yield nodes
        uncharged = UsageEvent.objects.filter(charged_at__isnull=True).count()
        yield GaugeMetricFamily(
            "apex_usage_uncharged", "Answers delivered and not yet charged.", value=uncharged
        )


@never_cache
def metrics_page(request: HttpRequest) -> HttpResponse:
    """GET /metrics for staff, for a bearer of METRICS_TOKEN, and for this machine itself."""
    if not _may_read(request):
        raise PermissionDenied
    registry = CollectorRegistry()
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        served = generate_latest(registry)
    else:
        served = generate_latest(REGISTRY)
    business = CollectorRegistry()
    business.register(_BusinessCollector())  # type: ignore[arg-type]
    return HttpResponse(served + generate_latest(business), content_type=CONTENT_TYPE_LATEST)


def _may_read(request: HttpRequest) -> bool:
    token: str = settings.METRICS_TOKEN
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if token and hmac.compare_digest(given.encode(), token.encode()):
        return True
    # A proxy on this machine also connects from loopback; it says so by the forwarding header.
    if request.META.get("REMOTE_ADDR") in {"127.0.0.1", "::1"} and "X-Forwarded-For" not in request.headers:
        return True
    return request.user.is_authenticated and request.user.is_active and request.user.is_staff
