"""As Alibaba Cloud and Tencent Cloud answer: a bare time, 404 until there is one."""

from __future__ import annotations

from datetime import timedelta, timezone

from aiohttp import web

from apex.local.metadata_service.aws import give_token, page
from apex.local.metadata_service.instance import Instance

_ALIBABA_TOKEN = "X-aliyun-ecs-metadata-token"  # noqa: S105 - the name of a header
_BEIJING = timezone(timedelta(hours=8))


async def alibaba_token(instance: Instance, request: web.Request) -> web.Response:
    return give_token(instance, request, _ALIBABA_TOKEN)


async def alibaba(instance: Instance, request: web.Request) -> web.Response:
    if status := instance.spoil("status"):
        return page(status)
    if not instance.accepts_token(request.headers.get(_ALIBABA_TOKEN, "")):
        return page(401)
    if request.match_info["path"] != "meta-data/instance/spot/termination-time" or not instance.deadline:
        return page(404)
    return _text(instance, instance.told_time())


async def tencent(instance: Instance, request: web.Request) -> web.Response:
    if status := instance.spoil("status"):
        return page(status)
    if request.match_info["path"] != "meta-data/spot/termination-time" or not instance.deadline:
        return page(404)
    local = instance.told_deadline().astimezone(_BEIJING)
    return _text(instance, local.strftime("%Y-%m-%d %H:%M:%S"))


def _text(instance: Instance, told: str) -> web.Response:
    return web.Response(text=str(instance.faults.get("body", told)))
