"""As Azure answers: scheduled events for every VM of the set, and their early start."""

from __future__ import annotations

import json
import random
from email.utils import format_datetime
from typing import Any

from aiohttp import web

from apex.local.metadata_service.instance import Instance


def _refusal(instance: Instance, request: web.Request) -> web.Response | None:
    if request.headers.get("Metadata", "").lower() != "true" or not request.query.get("api-version"):
        return web.json_response({"error": "Bad request. Required metadata header not specified"}, status=400)
    if status := instance.spoil("status"):
        return web.json_response({"error": "The service cannot answer now"}, status=status)
    return None


async def name(instance: Instance, request: web.Request) -> web.Response:
    return _refusal(instance, request) or web.Response(text=instance.name)


async def events(instance: Instance, request: web.Request) -> web.Response:
    if refusal := _refusal(instance, request):
        return refusal
    if "body" in instance.faults:
        return web.Response(text=str(instance.faults["body"]), content_type="application/json")
    listed = [_event(instance)] * (2 if instance.faults.get("twice") else 1) if instance.deadline else []
    listed += [_decoy(number) for number in range(int(instance.faults.get("decoys", 0)))]
    random.shuffle(listed)
    return web.json_response({"DocumentIncarnation": instance.version, "Events": listed})


def _event(instance: Instance) -> dict[str, Any]:
    started = instance.event_status == "Started"
    resources = [instance.faults["foreign"]] if "foreign" in instance.faults else instance.resources
    return {
        "EventId": instance.event_id,
        "EventType": instance.event_type,
        "ResourceType": "VirtualMachine",
        "Resources": resources,
        "EventStatus": instance.event_status,
        "NotBefore": "" if started else format_datetime(instance.told_deadline(), usegmt=True),
        "Description": "",
        "EventSource": "Platform",
    }


def _decoy(number: int) -> dict[str, Any]:
    return {
        "EventId": f"DECOY-{number}",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": [f"other-{number}"],
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
    }


async def start(instance: Instance, request: web.Request) -> web.Response:
    if refusal := _refusal(instance, request):
        return refusal
    wanted = [each["EventId"] for each in json.loads(await request.text())["StartRequests"]]
    known = [instance.start_event(event_id) for event_id in wanted]
    return web.Response(status=200 if all(known) else 400)
