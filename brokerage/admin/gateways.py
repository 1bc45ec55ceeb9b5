"""What every gateway has heard of eviction signals, as each keeps it in Redis."""

from __future__ import annotations

from typing import Any

import redis
from django.conf import settings

from kernel_steer.gateway.steering import DATAGRAM, STREAM
from kernel_steer.signals import GatewayReport, gateway_reports

_PATIENCE_S = 0.5
_ROWS_MAX = 50


def signals_heard() -> dict[str, Any]:
    """For the page of reroutes: `gateways`, or `gateways_unknown` when Redis does not answer in time."""
    try:
        with redis.Redis.from_url(
            settings.REDIS_URL, socket_timeout=_PATIENCE_S, socket_connect_timeout=_PATIENCE_S
        ) as client:
            reports = gateway_reports(client)
    except (redis.RedisError, OSError):
        return {"gateways_unknown": True}
    return {"gateways": [_row(name, report) for name, report in sorted(reports.items())[:_ROWS_MAX]]}


def _row(name: str, report: GatewayReport) -> dict[str, Any]:
    return {
        "name": name,
        "engine": report.engine,
        "carriers": [f"{report.first.get(by, 0)} of {report.heard.get(by, 0)}" for by in (DATAGRAM, STREAM)],
        "flips": report.flips,
        "found": report.flips_found,
        "restores": report.restores,
        "refused": sum(count for _, _, count in report.refused),
    }
