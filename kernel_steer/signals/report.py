"""What each gateway has heard of signals and done about them, for whoever asks one place for all of them.

Redis: `steer:gateway-report:ID` is JSON that expires unless it is renewed; `steer:gateways` is the set of ids.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import redis

logger = logging.getLogger(__name__)

INDEX = "steer:gateways"


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Counts since the gateway's start."""

    engine: str
    heard: dict[str, int]  # verified signals, by carrier
    first: dict[str, int]  # those that arrived there first, by carrier
    duplicates: int  # the other carrier was faster
    flips: int
    flips_found: int  # of the flips: the node itself had written them into the kernel before
    restores: int
    refused: list[tuple[str, str, int]]  # reason, carrier, count

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self))


def report_key(gateway: str) -> str:
    return f"steer:gateway-report:{gateway}"


def known_ids(client: redis.Redis) -> list[str]:
    """Of all gateways that registered, also of those that ended without a word. Raises redis.RedisError."""
    members: Any = client.smembers(INDEX)
    return sorted(member.decode() if isinstance(member, bytes) else member for member in members)


def gateway_reports(client: redis.Redis) -> dict[str, GatewayReport]:
    """By gateway, of those that live; at most as old as their registration. Raises redis.RedisError."""
    ids = known_ids(client)
    if not ids:
        return {}
    values: Any = client.mget([report_key(gateway) for gateway in ids])
    found = {gateway: _parse(value) for gateway, value in zip(ids, values, strict=True) if value is not None}
    return {gateway: report for gateway, report in found.items() if report is not None}


def _parse(value: bytes | str) -> GatewayReport | None:
    try:
        fields = orjson.loads(value)
        return GatewayReport(
            engine=str(fields["engine"]),
            heard=_counts(fields["heard"]),
            first=_counts(fields["first"]),
            duplicates=int(fields["duplicates"]),
            flips=int(fields["flips"]),
            flips_found=int(fields["flips_found"]),
            restores=int(fields["restores"]),
            refused=[(str(reason), str(carrier), int(count)) for reason, carrier, count in fields["refused"]],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("a report of a gateway is not readable (%s)", type(error).__name__)
        return None


def _counts(value: dict[str, Any]) -> dict[str, int]:
    return {str(carrier): int(count) for carrier, count in value.items()}
