"""Routes, counting and control."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from aiohttp import web

from apex.local.metadata_service import aws, azure, gcp, termination_time
from apex.local.metadata_service.instance import Instance

Handler = Callable[[web.Request], Awaitable[web.Response]]
Provider = Callable[[Instance, web.Request], Awaitable[web.Response]]


class MetadataService:
    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}

    def application(self) -> web.Application:
        app = web.Application()
        asked = self._counted
        app.add_routes(
            [
                web.get("/healthz", _healthz),
                web.post("/{instance}/_control", self.control),
                web.get("/{instance}/_control", self.counters),
                web.put("/{instance}/latest/api/token", asked(aws.token)),
                web.get("/{instance}/latest/{path:.*}", asked(aws.metadata)),
                web.get("/{instance}/computeMetadata/v1/instance/preempted", asked(gcp.preempted)),
                web.get("/{instance}/computeMetadata/v1/instance/maintenance-event", asked(gcp.maintenance)),
                web.get("/{instance}/metadata/instance/compute/name", asked(azure.name)),
                web.get("/{instance}/metadata/scheduledevents", asked(azure.events)),
                web.post("/{instance}/metadata/scheduledevents", asked(azure.start)),
                web.put("/{instance}/alibaba/latest/api/token", asked(termination_time.alibaba_token)),
                web.get("/{instance}/alibaba/latest/{path:.*}", asked(termination_time.alibaba)),
                web.get("/{instance}/tencent/latest/{path:.*}", asked(termination_time.tencent)),
            ]
        )
        return app

    def _instance(self, request: web.Request) -> Instance:
        name = request.match_info["instance"]
        return self.instances.setdefault(name, Instance(name))

    def _counted(self, provider: Provider) -> Handler:
        """The provider's answer, late if a fault says so, and counted while it is under way."""

        async def handle(request: web.Request) -> web.Response:
            instance = self._instance(request)
            instance.requests += 1
            instance.outstanding += 1
            instance.outstanding_max = max(instance.outstanding_max, instance.outstanding)
            try:
                await asyncio.sleep(instance.delay_s())
                return await provider(instance, request)
            finally:
                instance.outstanding -= 1

        return handle

    async def control(self, request: web.Request) -> web.Response:
        try:
            self._instance(request).obey(json.loads(await request.text()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f"not an order of the control protocol: {error}"}, status=400)
        return await self.counters(request)

    async def counters(self, request: web.Request) -> web.Response:
        return web.json_response(self._instance(request).counters())


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok")
