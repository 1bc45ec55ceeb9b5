"""Celery tasks: fetch, call a service, no more. All may run twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime

from celery import shared_task

from brokerage.services import charging, evictions, kept, nodes, topping_up

logger = logging.getLogger(__name__)

CHARGE_BATCH = 500


@shared_task(name="brokerage.tasks.record_heartbeat")
def record_heartbeat(
    name: str,
    epoch: int,
    host: str,
    port: int,
    model: str,
    tokenizer_id: str,
    slots: int,
    healthy: bool,
    engine: str = "",
    revision: str = "",
    template_id: str = "",
    capabilities: Sequence[str] = (),
    trouble: str = "",
) -> None:
    """What a node worker of before this release does not send has a default."""
    beat = nodes.Heartbeat(
        name,
        epoch,
        host,
        port,
        model,
        tokenizer_id,
        slots,
        healthy,
        engine,
        revision,
        template_id,
        tuple(capabilities),
        trouble,
    )
    try:
        nodes.record_heartbeat(heartbeat=beat)
    except nodes.UnknownNode as error:
        logger.warning("heartbeat dropped: %s", error)


@shared_task(name="brokerage.tasks.book_eviction")
def book_eviction(
    node: str, epoch: int, action: str, source: str, signal_at: str, deadline: str | None
) -> None:
    """Times are ISO 8601 with offset."""
    try:
        evictions.book_eviction(
            node=node,
            epoch=epoch,
            action=action,
            source=source,
            signal_at=datetime.fromisoformat(signal_at),
            deadline=datetime.fromisoformat(deadline) if deadline else None,
        )
    except nodes.UnknownNode as error:
        logger.warning("eviction notice dropped: %s", error)


@shared_task(name="brokerage.tasks.record_refused_signals")
def record_refused_signals(gateway: str, reason: str, carrier: str, count: int) -> None:
    evictions.record_refused_signals(gateway=gateway, reason=reason, carrier=carrier, count=count)


@shared_task(name="brokerage.tasks.charge_usage")
def charge_usage() -> None:
    """Sent after each batch of usage, and by beat for what was left behind."""
    while charging.charge_usage(limit=CHARGE_BATCH) == CHARGE_BATCH:
        pass


@shared_task(name="brokerage.tasks.sweep_nodes")
def sweep_nodes() -> None:
    nodes.sweep_lost_nodes()


@shared_task(name="brokerage.tasks.forget_kept_answers")
def forget_kept_answers() -> None:
    kept.forget_kept_answers()


@shared_task(name="brokerage.tasks.watch_wallets")
def watch_wallets() -> None:
    topping_up.watch_wallets()
