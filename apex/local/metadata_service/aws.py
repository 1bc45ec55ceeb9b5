"""As AWS answers (IMDSv2): session tokens with a life, 401 without one, 404 until something is scheduled."""

from __future__ import annotations

import json

from aiohttp import web

from apex.local.metadata_service.instance import Instance, iso_time

_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 - the name of a header
_PAGE = """<?xml version="1.0" encoding="iso-8859-1"?>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>{0}</title></head><body><h1>{0}</h1></body></html>
"""
_REASONS = {
    400: "400 - Bad Request",
    401: "401 - Unauthorized",
    403: "403 - Forbidden",
    404: "404 - Not Found",
}


def page(status: int) -> web.Response:
    """Refusals are web pages."""
    text = _PAGE.format(_REASONS.get(status, str(status)))
    return web.Response(status=status, text=text, content_type="text/html")


def give_token(instance: Instance, request: web.Request, header: str) -> web.Response:
    """PUT /latest/api/token, on AWS and on Alibaba."""
    if status := instance.spoil("token_status") or instance.spoil("status"):
        return page(status)
    if "X-Forwarded-For" in request.headers:
        return page(403)
    ttl = request.headers.get(f"{header}-ttl-seconds", "")
    token = instance.issue_token(ttl)
    if token is None:
        return page(400)
    return web.Response(text=token, headers={f"{header}-ttl-seconds": ttl})


async def token(instance: Instance, request: web.Request) -> web.Response:
    return give_token(instance, request, _TOKEN)


async def metadata(instance: Instance, request: web.Request) -> web.Response:
    if status := instance.spoil("status"):
        return page(status)
    if not instance.accepts_token(request.headers.get(_TOKEN, "")):
        return page(401)
    match request.match_info["path"]:
        case "meta-data/instance-id":
            return web.Response(text=instance.name)
        case "meta-data/spot/instance-action" if instance.deadline and not instance.faults.get("legacy"):
            return web.Response(text=_action_payload(instance), content_type="application/json")
        case "meta-data/spot/termination-time" if instance.deadline and instance.action == "terminate":
            return web.Response(text=str(instance.faults.get("body", instance.told_time())))
        case "meta-data/events/recommendations/rebalance" if instance.rebalance_at:
            return web.json_response({"noticeTime": iso_time(instance.rebalance_at)})
        case _:
            return page(404)


def _action_payload(instance: Instance) -> str:
    if "body" in instance.faults:
        return str(instance.faults["body"])
    payload = {"action": instance.action, "time": instance.told_time()}
    if "foreign" in instance.faults:
        payload["instance-id"] = instance.faults["foreign"]
    return json.dumps(payload)
