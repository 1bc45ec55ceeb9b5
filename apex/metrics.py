"""Prometheus metrics: what this process served, and the state of the business read at scrape time."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import aiohttp
import redis
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import Error, connection, transaction
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
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector

from brokerage.models import EvictionNotice, Node, UsageEvent
from brokerage.selectors import LATENCY_BOUNDS_MS, Latencies, reroute_latencies
from kernel_steer.signals import GatewayReport, gateway_reports
from ledger.models import Hold

log = logging.getLogger(__name__)

_requests = Counter("apex_http_requests_total", "Requests served.", ["method", "view", "status"])
_seconds = Histogram("apex_http_request_seconds", "Time to the response object, in seconds.", ["view"])
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
# A scrape may be slow nowhere: what takes longer is left out and says so in `apex_metrics_read`.
_QUERY_MS = 1000
_GATEWAY_S = 0.9
_REDIS_S = 0.9
_SOURCES_MAX = 50


def count_request(request: HttpRequest, response: HttpResponse, seconds: float) -> None:
    # Labels come from our own tables, never from the request: a scanner must not fill the memory.
    match = request.resolver_match
    view = match.view_name if match and match.view_name else "unmatched"
    method = request.method if request.method in _METHODS else "other"
    _requests.labels(method, view, str(response.status_code)).inc()
    _seconds.labels(view).observe(seconds)


class _DatabaseCollector:
    """Read at scrape time, so the figures are the same whichever process answers.

    One query a part, each with a limit of its own: a part that fails costs neither the others nor the scrape.
    """

    def collect(self) -> Iterator[Metric]:
        read = GaugeMetricFamily(
            "apex_metrics_read", "1 when this part could be read from the database.", labels=["part"]
        )
        reachable = _is_reachable()  # asked once, so that a server which never answers costs one wait
        for name, part in _PARTS.items():
            if not reachable:
                read.add_metric([name], 0)
                continue
            try:
                with transaction.atomic(), connection.cursor() as cursor:
                    cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(_QUERY_MS)])
                    families = part()
            except Error as error:
                log.warning("metrics of %s could not be read: %s", name, type(error).__name__)
                read.add_metric([name], 0)
            else:
                read.add_metric([name], 1)
                yield from families
        yield read


def _is_reachable() -> bool:
    try:
        connection.ensure_connection()
    except Error:
        return False
    return True


def _nodes() -> list[Metric]:
    nodes = GaugeMetricFamily("apex_nodes", "Nodes by state.", labels=["state"])
    counts = dict(Node.objects.order_by().values_list("state").annotate(Count("pk")))
    for state in Node.State.values:
        nodes.add_metric([state], counts.get(state, 0))
    return [nodes]


def _notices() -> list[Metric]:
    notices = CounterMetricFamily(
        "apex_eviction_notices", "Notices kept, by who said it and what.", labels=["source", "action"]
    )
    said = EvictionNotice.objects.order_by().values_list("source", "action").annotate(number=Count("pk"))
    for source, action, number in said.order_by("source", "action")[:_SOURCES_MAX]:
        notices.add_metric([source, action], number)
    return [notices]


def _reroutes() -> list[Metric]:
    found = reroute_latencies(percentiles=False)
    return [
        CounterMetricFamily(
            "apex_reroutes", "Incarnations that traffic was moved away from.", value=found.total
        ),
        _histogram("apex_reroute_flip_seconds", "From the signal to the flip, in seconds.", found.flip),
        _histogram(
            "apex_reroute_first_byte_seconds",
            "From the signal to the first byte of the next answer from another node, in seconds.",
            found.first_byte,
        ),
    ]


def _histogram(name: str, text: str, found: Latencies) -> Metric:
    bounds = [repr(bound / 1000) for bound in LATENCY_BOUNDS_MS]
    buckets = [*zip(bounds, found.cumulative, strict=True), ("+Inf", found.count)]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.sum_ms / 1000)


def _uncharged() -> list[Metric]:
    # By the index of uncharged rows, so it costs what is waiting.
    number = UsageEvent.objects.filter(charged_at__isnull=True).count()
    return [GaugeMetricFamily("apex_usage_uncharged", "Answers delivered and not yet charged.", value=number)]


def _charged() -> list[Metric]:
    number = UsageEvent.objects.filter(charged_at__isnull=False).count()
    return [CounterMetricFamily("apex_usage_charged", "Answers charged, the free ones too.", value=number)]


def _holds() -> list[Metric]:
    number = Hold.objects.filter(state=Hold.State.OPEN).count()
    return [GaugeMetricFamily("apex_holds_open", "Holds on credit that are open.", value=number)]


_PARTS: dict[str, Callable[[], list[Metric]]] = {
    "nodes": _nodes,
    "notices": _notices,
    "reroutes": _reroutes,
    "usage_uncharged": _uncharged,
    "usage_charged": _charged,
    "holds": _holds,
}


class _GatewayCollector:
    """What the gateway behind GATEWAY_PUBLIC_URL says of itself; its counters start anew when it does.

    Of several gateways behind one address each scrape meets one.
    """

    def collect(self) -> Iterator[Metric]:
        said = asyncio.run(_gateway_says())
        yield GaugeMetricFamily("apex_gateway_up", "1 when the gateway answers.", value=int(bool(said)))
        if not said:
            return
        draining = said.get("status") == "draining"
        yield GaugeMetricFamily(
            "apex_gateway_draining", "1 when it takes no new answers.", value=int(draining)
        )
        if isinstance(engine := said.get("engine"), str):
            yield InfoMetricFamily(
                "apex_gateway", "The engine that moves the packets.", value={"engine": engine}
            )
        for key, name, text in _GATEWAY_GAUGES:
            if _is_number(value := said.get(key)):
                yield GaugeMetricFamily(name, text, value=value)
        for key, name, text in _GATEWAY_COUNTERS:
            if _is_number(value := said.get(key)):
                yield CounterMetricFamily(name, text, value=value)


class _SignalsCollector:
    """What every gateway has heard of eviction signals; each keeps its counts in Redis and renews them.

    A gateway that starts again has another name, so its counters are new ones.
    """

    def collect(self) -> Iterator[Metric]:
        read = GaugeMetricFamily(
            "apex_steer_read", "1 when the reports of the gateways could be read from Redis."
        )
        try:
            with redis.Redis.from_url(
                settings.REDIS_URL, socket_timeout=_REDIS_S, socket_connect_timeout=_REDIS_S
            ) as client:
                reports = gateway_reports(client)
        except (redis.RedisError, OSError) as error:
            log.warning("reports of the gateways could not be read: %s", type(error).__name__)
            read.add_metric([], 0)
            yield read
            return
        read.add_metric([], 1)
        yield read
        yield from _signals(dict(sorted(reports.items())[:_SOURCES_MAX]))


def _signals(reports: Mapping[str, GatewayReport]) -> list[Metric]:
    gateways = GaugeMetricFamily(
        "apex_steer_gateways", "Gateways that take signals, by engine.", labels=["engine"]
    )
    heard = _steer_counter("signals_heard", "Signals that were believed.", "carrier")
    first = _steer_counter("signals_first", "Of these, those that no other carrier had brought.", "carrier")
    duplicates = _steer_counter("signals_duplicate", "Of these, those that another carrier had brought.")
    refused = _steer_counter("signals_refused", "Signals that were not believed.", "reason", "carrier")
    flips = _steer_counter("flips", "Nodes flipped away.")
    found = _steer_counter("flips_found", "Of these, flips that the node itself had written into the kernel.")
    restores = _steer_counter("restores", "Nodes flipped back: their notice was cancelled.")
    for engine, number in Counts(report.engine for report in reports.values()).items():
        gateways.add_metric([engine], number)
    for gateway, report in reports.items():
        for carrier, number in report.heard.items():
            heard.add_metric([gateway, carrier], number)
        for carrier, number in report.first.items():
            first.add_metric([gateway, carrier], number)
        for reason, carrier, number in report.refused:
            refused.add_metric([gateway, reason, carrier], number)
        duplicates.add_metric([gateway], report.duplicates)
        flips.add_metric([gateway], report.flips)
        found.add_metric([gateway], report.flips_found)
        restores.add_metric([gateway], report.restores)
    return [gateways, heard, first, duplicates, refused, flips, found, restores]


def _steer_counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"apex_steer_{name}", text, labels=["gateway", *labels])


# What it does not say is left out: a figure of 0 would claim something.
_GATEWAY_GAUGES = (
    ("answers_open", "apex_gateway_answers_open", "Answers that are not settled."),
    ("flows_open", "apex_gateway_flows_open", "Legs that are being forwarded."),
    ("ports_open", "apex_gateway_ports_open", "Steered ports it listens on."),
    ("ports_failed", "apex_gateway_ports_failed", "Steered ports it cannot open."),
    ("port_connections_open", "apex_gateway_port_connections_open", "Connections of steered ports."),
)
_GATEWAY_COUNTERS = (
    ("flows_total", "apex_gateway_flows", "Legs since its start."),
    ("flips", "apex_gateway_flips", "Nodes flipped away since its start."),
    ("bytes_forwarded", "apex_gateway_forwarded_bytes", "Bytes of answers forwarded since its start."),
    ("signals_refused", "apex_gateway_signals_refused", "Eviction signals not believed since its start."),
    ("port_connections", "apex_gateway_port_connections", "Connections of steered ports since its start."),
    (
        "port_connections_refused",
        "apex_gateway_port_connections_refused",
        "Of these, those over a port's limit.",
    ),
    ("port_moves", "apex_gateway_port_moves", "Requests and idle connections that went on at another node."),
    ("port_requests_sent_again", "apex_gateway_port_requests_sent_again", "Of these, whose node was lost."),
    (
        "port_requests_unserved",
        "apex_gateway_port_requests_unserved",
        "Answered 502 or 503 for want of a node.",
    ),
    ("port_responses_cut", "apex_gateway_port_responses_cut", "Responses that a lost node left incomplete."),
    (
        "port_handovers",
        "apex_gateway_port_handovers",
        "Times that the kernel left a connection to user space.",
    ),
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


async def _gateway_says() -> dict[str, Any]:
    """Its /healthz, or nothing: a gateway that is down, slow or talks nonsense must not fail a scrape."""
    timeout = aiohttp.ClientTimeout(total=_GATEWAY_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{settings.GATEWAY_PUBLIC_URL}/healthz") as response,
        ):
            said = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


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
    business.register(_DatabaseCollector())
    business.register(_GatewayCollector())
    business.register(_SignalsCollector())
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
