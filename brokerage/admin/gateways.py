"""What every gateway has heard of eviction signals, as each keeps it in Redis."""

from __future__ import annotations

from typing import Any

import redis
from django.conf import settings

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
        "heard": _by_carrier(report.heard),
        "first": _by_carrier(report.first),
        "duplicates": report.duplicates,
        "flips": report.flips,
        "found": report.flips_found,
        "restores": report.restores,
        "refused": ", ".join(f"{count} {reason} ({carrier})" for reason, carrier, count in report.refused)
        or "none",
    }


def _by_carrier(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} by {carrier}" for carrier, count in sorted(counts.items())) or "none"
