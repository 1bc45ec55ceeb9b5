"""AWS's instance metadata service (IMDSv2) for the demo and the tests, several instances on one port.

    python -m apex.local.metadata_service --port N

Instance NAME answers under `/NAME/latest/...` as AWS does: session tokens with a life, 401 without one,
404 until an interruption is scheduled, and the same payloads. What happens to it is told to `_control`:

    POST /NAME/_control  {"schedule": {"action": "terminate", "in_s": 120}}
                         {"cancel": true}
                         {"rebalance": true}
                         {"expire_tokens": true}          every token issued so far is void
                         {"faults": {...}}                replaces the faults; {} heals
    GET  /NAME/_control  counters, for tests

Faults: `status` (every answer has it: 401, 404, 429, 503), `token_status` (only for tokens), `times`
(how many answers the two spoil, without it all), `slow_s`, `jitter` (another time at every request),
`foreign` (notices name this instance), `body` (sent instead of the payload).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 - the name of a header
_FAULTS = {"status", "token_status", "times", "slow_s", "jitter", "foreign", "body"}
_PAGE = """<?xml version="1.0" encoding="iso-8859-1"?>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>{0}</title></head><body><h1>{0}</h1></body></html>
"""
_REASONS = {
    400: "400 - Bad Request",
    401: "401 - Unauthorized",
    403: "403 - Forbidden",
    404: "404 - Not Found",
}


@dataclass
class Instance:
    """One machine as its metadata service knows it. Times are aware UTC."""

    name: str
    action: str | None = None
    deadline: datetime | None = None
    rebalance_at: datetime | None = None
    faults: dict[str, Any] = field(default_factory=dict)
    token_ends: dict[str, float] = field(default_factory=dict)
    requests: int = 0
    tokens_issued: int = 0
    outstanding: int = 0
    outstanding_max: int = 0

    def spoil(self, kind: str) -> int | None:
        """The status that a fault imposes on this answer."""
        status = self.faults.get(kind)
        if status is None or self.faults.get("times", 1) < 1:
            return None
        if "times" in self.faults:
            self.faults["times"] -= 1
        return int(status)

    def action_payload(self) -> str:
        if "body" in self.faults:
            return str(self.faults["body"])
        assert self.deadline is not None
        jitter = timedelta(milliseconds=random.randint(0, 900) if self.faults.get("jitter") else 0)  # noqa: S311
        payload = {"action": self.action, "time": _aws_time(self.deadline + jitter, exact=bool(jitter))}
        if "foreign" in self.faults:
            payload["instance-id"] = self.faults["foreign"]
        return json.dumps(payload)


def _aws_time(moment: datetime, *, exact: bool = False) -> str:
    return (
        moment.astimezone(UTC)
        .isoformat(timespec="milliseconds" if exact else "seconds")
        .replace("+00:00", "Z")
    )


class MetadataService:
    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", _healthz),
                web.post("/{instance}/_control", self.control),
                web.get("/{instance}/_control", self.counters),
                web.put("/{instance}/latest/api/token", self.token),
                web.get("/{instance}/latest/{path:.*}", self.metadata),
            ]
        )
        return app

    def _instance(self, request: web.Request) -> Instance:
        name = request.match_info["instance"]
        return self.instances.setdefault(name, Instance(name))

    # --- as AWS answers --------------------------------------------------------------------------------

    async def token(self, request: web.Request) -> web.Response:
        instance = self._instance(request)
        return await self._counted(instance, self._token(instance, request))

    async def metadata(self, request: web.Request) -> web.Response:
        instance = self._instance(request)
        return await self._counted(instance, self._metadata(instance, request))

    async def _counted(self, instance: Instance, answer: Any) -> web.Response:
        instance.requests += 1
        instance.outstanding += 1
        instance.outstanding_max = max(instance.outstanding_max, instance.outstanding)
        try:
            await asyncio.sleep(float(instance.faults.get("slow_s", 0)))
            result: web.Response = await answer
            return result
        finally:
            answer.close()
            instance.outstanding -= 1

    async def _token(self, instance: Instance, request: web.Request) -> web.Response:
        if status := instance.spoil("token_status") or instance.spoil("status"):
            return _page(status)
        if "X-Forwarded-For" in request.headers:
            return _page(403)
        ttl = request.headers.get(f"{_TOKEN}-ttl-seconds", "")
        if not ttl.isdecimal() or not 1 <= int(ttl) <= 21_600:
            return _page(400)
        token = secrets.token_urlsafe(40)
        instance.token_ends[token] = time.monotonic() + int(ttl)
        instance.tokens_issued += 1
        return web.Response(text=token, headers={f"{_TOKEN}-ttl-seconds": ttl})

    async def _metadata(self, instance: Instance, request: web.Request) -> web.Response:
        if status := instance.spoil("status"):
            return _page(status)
        if instance.token_ends.get(request.headers.get(_TOKEN, ""), 0) < time.monotonic():
            return _page(401)
        match request.match_info["path"]:
            case "meta-data/instance-id":
                return web.Response(text=instance.name)
            case "meta-data/spot/instance-action" if instance.deadline:
                return web.Response(text=instance.action_payload(), content_type="application/json")
            case "meta-data/spot/termination-time" if instance.deadline and instance.action == "terminate":
                return web.Response(text=_aws_time(instance.deadline))
            case "meta-data/events/recommendations/rebalance" if instance.rebalance_at:
                return web.json_response({"noticeTime": _aws_time(instance.rebalance_at)})
            case _:
                return _page(404)

    # --- control ---------------------------------------------------------------------------------------

    async def control(self, request: web.Request) -> web.Response:
        instance = self._instance(request)
        try:
            order = json.loads(await request.text())
            _obey(instance, order)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f"not an order of the control protocol: {error}"}, status=400)
        return await self.counters(request)

    async def counters(self, request: web.Request) -> web.Response:
        instance = self._instance(request)
        return web.json_response(
            {
                "requests": instance.requests,
                "tokens_issued": instance.tokens_issued,
                "outstanding_max": instance.outstanding_max,
                "action": instance.action,
                "deadline": _aws_time(instance.deadline) if instance.deadline else None,
            }
        )


def _obey(instance: Instance, order: dict[str, Any]) -> None:
    for name, value in order.items():
        match name:
            case "schedule":
                instance.deadline = datetime.now(UTC) + timedelta(seconds=float(value.get("in_s", 120)))
                instance.action = str(value.get("action", "terminate"))
            case "cancel":
                instance.action = instance.deadline = None
            case "rebalance":
                instance.rebalance_at = datetime.now(UTC)
            case "expire_tokens":
                instance.token_ends.clear()
            case "faults":
                if unknown := set(value) - _FAULTS:
                    raise ValueError(f"unknown faults {sorted(unknown)}")
                instance.faults = dict(value)
            case _:
                raise ValueError(f"unknown order {name!r}")


def _page(status: int) -> web.Response:
    text = _PAGE.format(_REASONS.get(status, str(status)))
    return web.Response(status=status, text=text, content_type="text/html")


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m apex.local.metadata_service")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    try:
        web.run_app(
            MetadataService().application(),
            host=arguments.host,
            port=arguments.port,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1,
            print=lambda *_: None,
        )
    except OSError as error:
        sys.exit(f"apex: cannot listen on {arguments.host}:{arguments.port}: {error.strerror}")


if __name__ == "__main__":
    main()
