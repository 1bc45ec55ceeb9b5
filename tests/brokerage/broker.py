"""A broker over real PostgreSQL with the least that it can sell, and what its tests have in common."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import psycopg
import pytest
from django.db import connections

from apex.local.postgres import SUPERUSER
from brokerage.admission import BrokerageAdmission
from brokerage.models import APIKey, Customer, ModelPrice, Node
from kernel_steer.admission import Answer, Caller, LegReport, Outcome, Refusal, Ticket
from tests.brokerage import factories
from tests.services import database_url

T = TypeVar("T")
NOW = datetime(2026, 12, 1, 10, 0, tzinfo=UTC)


@dataclass
class World:
    """One customer with a key and 1 USD, one model, one ready node."""

    database: str
    customer: Customer
    key: APIKey
    plaintext: str
    price: ModelPrice
    node: Node

    @property
    def bearer(self) -> str:
        return f"Bearer {self.plaintext}"


@pytest.fixture
def world(fresh_database: str) -> World:
    customer = factories.make_customer(credit="1")
    key, plaintext = factories.make_key(customer)
    price = factories.make_price(
        factories.make_model("gemma", context_tokens=1000), prompt="0.0001", completion="0.0002"
    )
    node = factories.make_node("node-a", state="ready", epoch=7, host="127.0.0.1", port=9001, slots=1000)
    connections.close_all()
    return World(fresh_database, customer, key, plaintext, price, node)


@pytest.fixture
async def admission(world: World) -> AsyncIterator[BrokerageAdmission]:
    broker = BrokerageAdmission()
    await broker.start()
    yield broker
    await broker.stop()


async def orm(work: Callable[[], T]) -> T:
    """Django's ORM in a thread of its own, as it would be in another process."""

    def run() -> T:
        try:
            return work()
        finally:
            connections.close_all()

    return await asyncio.to_thread(run)


async def eventually(condition: Callable[[], Any], *, timeout_s: float = 30.0) -> Any:
    """Awaits until `condition()` is true and returns what it gave."""
    async with asyncio.timeout(timeout_s):
        while not (result := await condition()):
            await asyncio.sleep(0.02)
        return result


@asynccontextmanager
async def database_away(world: World) -> AsyncIterator[None]:
    """Nobody gets into that database, and who is in is thrown out."""
    server = database_url("postgres", SUPERUSER)
    async with await psycopg.AsyncConnection.connect(server, autocommit=True) as admin:
        await admin.execute(f"ALTER DATABASE {world.database} ALLOW_CONNECTIONS false")
        await throw_out(admin, world)
        try:
            yield
        finally:
            await admin.execute(f"ALTER DATABASE {world.database} ALLOW_CONNECTIONS true")


async def throw_out(admin: psycopg.AsyncConnection[Any], world: World) -> None:
    await admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [world.database]
    )


async def admit(admission: BrokerageAdmission, world: World, **changes: Any) -> Ticket:
    caller = Caller(str(world.key.pk), str(world.customer.pk))
    asked = {
        "request_id": str(uuid.uuid4()),
        "model": "gemma",
        "prompt_tokens_max": 100,
        "completion_tokens_max": 50,
    }
    return await admission.admit(caller, **(asked | changes))


async def refusal_of(awaitable: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await awaitable
    return caught.value


def answer_for(ticket: Ticket, **changes: Any) -> Answer:
    finished = {
        "request_id": ticket.request_id,
        "record": ticket.record,
        "outcome": Outcome.COMPLETED,
        "prompt_tokens": 80,
        "completion_tokens": 40,
        "legs": [LegReport(1, "node-a", 80, 15, "reset"), LegReport(2, "node-b", 95, 25, "completed")],
        "started_at": NOW,
        "finished_at": NOW + timedelta(seconds=2),
    }
    return Answer(**(finished | changes))
