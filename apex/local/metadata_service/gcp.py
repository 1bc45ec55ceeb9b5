"""As Google's metadata server answers: `instance/preempted`, which may hang until it changes, and `maintenance-event`."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiohttp import web

from apex.local.metadata_service.instance import Instance

_FLAVOR = "Metadata-Flavor"


async def preempted(instance: Instance, request: web.Request) -> web.Response:
    if refusal := _refusal(instance, request):
        return refusal
    if request.query.get("wait_for_change") == "true" and request.query.get("last_etag") in {
        None,
        _etag(instance),
    }:
        timeout_s = float(request.query.get("timeout_sec", "3600"))
        with suppress(TimeoutError):  # then the same answer again
            await asyncio.wait_for(instance.changed.wait(), timeout_s)
        if status := instance.spoil("status"):
            return web.Response(status=status, text="The service cannot answer now.\n")
    text = str(instance.faults.get("body", "TRUE" if instance.deadline else "FALSE"))
    return _said(instance, text)


async def maintenance(instance: Instance, request: web.Request) -> web.Response:
    return _refusal(instance, request) or _said(instance, instance.maintenance)


def _refusal(instance: Instance, request: web.Request) -> web.Response | None:
    if request.headers.get(_FLAVOR) != "Google" or "X-Forwarded-For" in request.headers:
        return web.Response(status=403, text="Missing Metadata-Flavor:Google header.\n")
    if status := instance.spoil("status"):
        return web.Response(status=status, text="The service cannot answer now.\n")
    return None


def _said(instance: Instance, text: str) -> web.Response:
    headers = {"ETag": _etag(instance)}
    if not instance.faults.get("unflavoured"):
        headers[_FLAVOR] = "Google"
    return web.Response(text=text, headers=headers, content_type="application/text")


def _etag(instance: Instance) -> str:
    return f"{instance.version:016x}"
