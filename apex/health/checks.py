"""The checks of the health matrix. Each really uses its part; none says anything that is not public."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from typing import Any

import aiohttp
from celery import current_app
from django.conf import settings
from django.core.cache import cache as shared_cache
from django.db import connection, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Max, Sum
from django.utils import timezone
from kombu import Exchange, Producer, Queue

from apex.health.matrix import FAIL, PASS, WARN, Finding
from apex.models import HealthProbe
from brokerage.models import Node
from ledger.models import Entry, Journal
from ledger.paypal.selectors import paypal_state
from ledger.selectors import audit_lag, last_proof

_HTTP_S = 0.9
_WORKER_S = 1.2
_RECENT_JOURNALS = 1000
# The books are proved every night, the audit trail is sealed every few seconds.
_PROOF_AGE, _SEAL_LAG = timedelta(hours=36), timedelta(minutes=2)
_LINK_LOCAL = "http://169.254."
# What a part says about itself is shown only if it can hold neither a path nor an address.
_PLAIN_TEXT = re.compile(r"(?:[A-Za-z0-9 ,;()=_-]|: ){1,160}")


def check_database() -> Finding:
    """Writes a row, reads it back and rolls it back."""
    token = uuid.uuid4()
    with transaction.atomic():
        HealthProbe.objects.create(token=token)
        found = HealthProbe.objects.filter(token=token).exists()
        transaction.set_rollback(True)
    return Finding(PASS, "wrote and read back") if found else Finding(FAIL, "a written row could not be read")


@cache
def _migrations_on_disk() -> frozenset[tuple[str, str]]:
    return frozenset(MigrationLoader(None).disk_migrations or {})


def check_migrations() -> Finding:
    missing = len(_migrations_on_disk() - set(MigrationRecorder(connection).applied_migrations()))
    return Finding(FAIL, f"{missing} not applied") if missing else Finding(PASS, "all applied")


def check_cache() -> Finding:
    key, value = f"health:{uuid.uuid4().hex}", uuid.uuid4().hex
    shared_cache.set(key, value, timeout=5)
    found = shared_cache.get(key)
    shared_cache.delete(key)
    return Finding(PASS, "set and got back") if found == value else Finding(FAIL, "a set value was not there")


def check_broker() -> Finding:
    """Sends a message through a queue of its own and takes it out again."""
    token = uuid.uuid4().hex
    with current_app.connection_for_write(connect_timeout=1) as link:
        link.ensure_connection(max_retries=1, interval_start=0, timeout=1)
        channel = link.default_channel
        queue = Queue(f"health.{token}", Exchange(""), routing_key=f"health.{token}", durable=False)(channel)
        queue.declare()
        try:
            Producer(channel).publish({"token": token}, routing_key=queue.name, serializer="json")
            message = queue.get(no_ack=True)
        finally:
            queue.delete()
    if message is None or message.payload.get("token") != token:
        return Finding(FAIL, "a sent message did not come back")
    return Finding(PASS, "a message went round")


class _Answered(Exception):
    """Ends the wait for more replies as soon as one is enough."""


def check_workers() -> Finding:
    """Asks the workers what they consume: a node worker alone does not do the platform's tasks."""
    others: set[str] = set()

    def on_reply(reply: dict[str, Any]) -> None:
        for worker, queues in reply.items():
            if any(queue.get("name") == current_app.conf.task_default_queue for queue in queues):
                raise _Answered
            others.add(worker)

    try:
        current_app.control.inspect(timeout=_WORKER_S, callback=on_reply).active_queues()
    except _Answered:
        return Finding(PASS, "a worker answers")
    if others:
        return Finding(FAIL, f"{len(others)} node workers answer, none that does the platform's tasks")
    return Finding(FAIL, "no worker answers")


def _get_many(requests: Iterable[tuple[str, str, dict[str, Any]]]) -> list[tuple[int, Any]]:
    """(method, url, options) -> (HTTP status, JSON or None) in the same order; status 0: no answer."""

    async def one(
        session: aiohttp.ClientSession, method: str, url: str, options: dict[str, Any]
    ) -> tuple[int, Any]:
        try:
            async with session.request(method, url, **options) as response:
                is_json = response.content_type == "application/json"
                return response.status, await response.json() if is_json else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return 0, None

    async def everything() -> list[tuple[int, Any]]:
        timeout = aiohttp.ClientTimeout(total=_HTTP_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return list(await asyncio.gather(*(one(session, *request) for request in requests)))

    return asyncio.run(everything())


def _gateway_says() -> tuple[int, dict[str, Any]]:
    [(status, body)] = _get_many([("GET", f"{settings.GATEWAY_PUBLIC_URL}/healthz", {})])
    return status, body if isinstance(body, dict) else {}


def check_gateway() -> Finding:
    status, body = _gateway_says()
    if not status:
        return Finding(FAIL, "no answer")
    said = body.get("status")
    if status == 200 and said in {PASS, "ok"}:
        return Finding(PASS, "answers")
    if status == 200 and said == "draining":
        return Finding(WARN, "finishes its answers and takes no new ones")
    return Finding(FAIL, "answers that it is not well")


def check_engine() -> Finding:
    """The engine that moves the packets, as the gateway reports it."""
    status, body = _gateway_says()
    engine, why = body.get("engine"), str(body.get("engine_detail") or "")
    if not status or not isinstance(engine, str) or not _PLAIN_TEXT.fullmatch(engine):
        return Finding(FAIL, "the gateway reports no engine")
    return Finding(PASS, f"{engine}: {why}" if _PLAIN_TEXT.fullmatch(why) else engine)


def check_nodes() -> Finding:
    """Calls every node that is said to be ready."""
    ready = list(Node.objects.filter(state=Node.State.READY).values_list("host", "port"))
    if not ready:
        if Node.objects.exclude(state=Node.State.GONE).exists():
            return Finding(FAIL, "no node is ready")
        return Finding(WARN, "no node yet")
    answers = _get_many(("GET", f"http://{host}:{port}/health", {}) for host, port in ready)
    well = sum(status == 200 for status, _ in answers)
    detail = f"{well} of {len(ready)} ready nodes answer"
    if well == len(ready):
        return Finding(PASS, detail)
    return Finding(WARN if well else FAIL, detail)


def check_providers() -> Finding:
    """A metadata service that was set up to be reached from anywhere has to answer; others are per node."""
    own_only = not Node.objects.exclude(provider="mesh").exclude(state=Node.State.GONE).exists()
    whose = "own nodes only" if own_only else "nodes of providers report by themselves"
    if settings.IMDS_AWS_URL.startswith(_LINK_LOCAL):
        return Finding(PASS, whose)
    token_request = (
        "PUT",
        f"{settings.IMDS_AWS_URL}/latest/api/token",
        {
            "headers": {"X-aws-ec2-metadata-token-ttl-seconds": "60"},
        },
    )
    [(status, _)] = _get_many([token_request])
    # Any sane answer proves that it is there: a service for several machines knows no nameless one.
    if 0 < status < 500:
        return Finding(PASS, f"{whose}; the metadata service answers")
    return Finding(WARN, f"{whose}; the metadata service does not answer")


_PAYPAL_URLS = {"sandbox": "https://api-m.sandbox.paypal.com", "live": "https://api-m.paypal.com"}


def check_paypal() -> Finding:
    """Signs in at the payment API with our credentials, which proves reach and credentials at once.

    Then whether what PayPal tells us is believed, booked and compared: what waits for a person is a warning.
    """
    base = _PAYPAL_URLS.get(settings.PAYPAL_MODE, settings.PAYPAL_STUB_URL)
    sign_in = (
        "POST",
        f"{base}/v1/oauth2/token",
        {
            "headers": {
                "Authorization": aiohttp.encode_basic_auth(
                    settings.PAYPAL_CLIENT_ID, settings.PAYPAL_CLIENT_SECRET
                )
            },
            "data": {"grant_type": "client_credentials"},
        },
    )
    [(status, body)] = _get_many([sign_in])
    if status == 200 and isinstance(body, dict) and body.get("access_token"):
        return _paypal_books(f"signed in ({settings.PAYPAL_MODE})")
    if status in {400, 401, 403}:
        return Finding(FAIL, "refuses our credentials")
    return Finding(FAIL, "no answer")


def _paypal_books(signed_in: str) -> Finding:
    state = paypal_state()
    troubles = [
        text
        for trouble, text in (
            (not settings.PAYPAL_WEBHOOK_ID, "webhooks cannot be checked without PAYPAL_WEBHOOK_ID"),
            (state.events_stuck, "events are not applied"),
            (state.parked_events, "parked events wait for a person"),
            (state.open_differences, "differences to its own list wait for a person"),
            (state.reconciliation_due, "its own list was not compared"),
        )
        if trouble
    ]
    if troubles:
        return Finding(WARN, "; ".join([signed_in, *troubles]))
    return Finding(PASS, f"{signed_in}; events applied, books compared")


def check_ledger() -> Finding:
    """Money is neither made nor lost: the newest journals sum to zero now, the last nightly proof of all of them
    held, and the audit trail is being sealed."""
    newest = Journal.objects.aggregate(newest=Max("pk"))["newest"] or 0
    recent = Entry.objects.filter(journal_id__gt=newest - _RECENT_JOURNALS).order_by().values("journal_id")
    unbalanced = recent.annotate(total=Sum("amount")).exclude(total=0).count()
    if unbalanced:
        return Finding(FAIL, f"{unbalanced} journals do not sum to zero")
    proof, lag = last_proof(), audit_lag()
    if proof and not proof.ok:
        return Finding(FAIL, f"{len(proof.failed)} checks of the last proof do not hold")
    if proof and timezone.now() - proof.finished_at > _PROOF_AGE:
        return Finding(WARN, "the books were not proved for a day and a half")
    if lag is not None and lag > _SEAL_LAG:
        return Finding(WARN, "the audit trail is not being sealed")
    proved = "all checks of the last proof hold" if proof else "not proved yet"
    return Finding(PASS, f"the last {_RECENT_JOURNALS} journals sum to zero, {proved}")
