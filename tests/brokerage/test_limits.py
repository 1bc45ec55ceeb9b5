"""Rate limits of API keys: two gateways, real Valkey, real PostgreSQL."""

import asyncio
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from brokerage.admission import BrokerageAdmission, limits
from brokerage.admission.limit_scripts import keys_of
from brokerage.services.limits import set_key_limits
from kernel_steer.admission import Refusal, Ticket
from ledger.models import Hold
from ledger.selectors import wallet
from tests.brokerage import factories
from tests.brokerage.broker import (
    World,
    admit,
    answer_for,
    database_away,
    eventually,
    orm,
    refusal_of,
    world,
)
from tests.services import database_url

__all__ = ["world"]  # a fixture


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For floods on a slow machine: neither server counts as away because it is busy."""
    monkeypatch.setattr("brokerage.admission.database._WAIT_FOR_CONNECTION_S", 60.0)
    monkeypatch.setattr("brokerage.admission.database.CALL_TIMEOUT_S", 60.0)
    monkeypatch.setattr("brokerage.admission.limits._TIMEOUT_S", 60.0)


@pytest.fixture
async def gateways(world: World, redis_client: redis.Redis) -> AsyncIterator[list[BrokerageAdmission]]:
    brokers = [BrokerageAdmission(), BrokerageAdmission()]
    for broker in brokers:
        await broker.start()
    yield brokers
    for broker in brokers:
        await broker.stop()


async def limit(gateways: list[BrokerageAdmission], world: World, **wanted: int) -> None:
    """Sets the limits of the world's key and waits until every gateway has them."""
    await orm(lambda: set_key_limits(key=world.key, actor=None, **(_UNLIMITED | wanted)))
    expected = limits.KeyLimits(**(_UNLIMITED | wanted))

    async def known() -> bool:
        return all(g._snapshot.limits.get(str(world.key.pk)) == expected for g in gateways)

    await eventually(known)


_UNLIMITED: dict[str, Any] = dict.fromkeys(
    ("requests_per_minute", "tokens_per_minute", "concurrent_answers"), None
)


async def flood(gateways: list[BrokerageAdmission], world: World, count: int) -> list[Ticket | Refusal]:
    """`count` requests of one token at once, spread over the gateways."""
    attempts = [
        admit(gateways[number % len(gateways)], world, prompt_tokens_max=1, completion_tokens_max=1)
        for number in range(count)
    ]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    assert all(isinstance(result, Ticket | Refusal) for result in results), results
    return results


def tickets(results: list[Ticket | Refusal]) -> list[Ticket]:
    return [result for result in results if isinstance(result, Ticket)]


async def open_answers(client: redis.Redis, world: World) -> int:
    return client.zcard(keys_of(str(world.key.pk))[1])


async def held(world: World) -> Any:
    return (await orm(lambda: wallet(world.customer.wallet_code))).held


# --- correct under concurrency --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"requests_per_minute": 50}, "50 requests per minute"),
        ({"concurrent_answers": 50}, "50 answers at a time"),
        ({"tokens_per_minute": 100}, "100 tokens per minute"),
    ],
    ids=["requests", "answers", "tokens"],
)
async def test_200_at_once_over_two_gateways_pass_exactly_50(
    patience, gateways, world, redis_client, monkeypatch, wanted, named
):
    # A minute long enough that the bucket gains nothing while the test runs.
    stretch_the_minute(monkeypatch, gateways)
    await limit(gateways, world, **wanted)
    results = await flood(gateways, world, 200)
    refused = [result for result in results if isinstance(result, Refusal)]
    assert len(tickets(results)) == 50
    assert {(r.status, r.code) for r in refused} == {(429, "rate_limit_exceeded")}
    assert all(named in r.message and r.retry_after_s >= 1 for r in refused)
    # Fewer where a credit lease covers several.
    assert await orm(Hold.objects.exclude(key__startswith="lease:").count) <= 50
    assert await open_answers(redis_client, world) == 50


def stretch_the_minute(monkeypatch: pytest.MonkeyPatch, gateways: list[BrokerageAdmission]) -> None:
    """An hour in its place, in the scripts of these gateways."""
    for gateway in gateways:
        rates = gateway._rates
        for name in ("_take", "_end", "_renew"):
            slow = getattr(rates, name).script.replace("MINUTE_MS = 60000", "MINUTE_MS = 3600000")
            assert "3600000" in slow
            monkeypatch.setattr(rates, name, rates._redis.register_script(slow))


async def test_a_key_without_limits_asks_nothing_of_redis(gateways, world, redis_client):
    ticket = await admit(gateways[0], world)
    assert "limited" not in ticket.record
    await gateways[0].settle(answer_for(ticket))
    assert redis_client.keys("apex:limits:*") == []


async def test_the_same_request_counts_once(gateways, world, redis_client):
    await limit(gateways, world, concurrent_answers=1)
    request_id = str(uuid.uuid4())
    first, second = [await admit(gateway, world, request_id=request_id) for gateway in gateways]
    assert first == second
    assert await open_answers(redis_client, world) == 1


async def test_limits_of_another_key_are_its_own(gateways, world):
    await limit(gateways, world, concurrent_answers=1)
    other, _ = await orm(lambda: factories.make_key(world.customer))
    await admit(gateways[0], world)
    assert (await refusal_of(admit(gateways[1], world))).status == 429
    mine = World(world.database, world.customer, other, "", world.price, world.node)
    assert await admit(gateways[1], mine)


async def test_a_limit_that_is_taken_away_is_gone_within_a_refresh(gateways, world):
    await limit(gateways, world, concurrent_answers=1)
    await admit(gateways[0], world)
    assert (await refusal_of(admit(gateways[0], world))).status == 429
    await orm(lambda: set_key_limits(key=world.key, actor=None, **_UNLIMITED))

    async def passes() -> bool:
        try:
            return bool(await admit(gateways[0], world))
        except Refusal:
            return False

    assert await eventually(passes)


# --- tokens ---------------------------------------------------------------------------------------


async def test_what_was_reserved_and_not_used_is_given_back(gateways, world, monkeypatch):
    stretch_the_minute(monkeypatch, gateways)
    await limit(gateways, world, tokens_per_minute=200)
    ticket = await admit(gateways[0], world)  # reserves 100 + 50
    refusal = await refusal_of(admit(gateways[1], world))
    assert refusal.status == 429
    assert 1790 <= refusal.retry_after_s <= 1800  # 100 of 200 are missing: half of the stretched minute
    await gateways[1].settle(answer_for(ticket, prompt_tokens=10, completion_tokens=20))
    assert await admit(gateways[1], world)  # 170 were left
    assert (await refusal_of(admit(gateways[0], world))).status == 429


async def test_settling_twice_gives_back_once(gateways, world, monkeypatch):
    stretch_the_minute(monkeypatch, gateways)
    await limit(gateways, world, tokens_per_minute=300)
    first, _ = [await admit(gateways[0], world) for _ in range(2)]  # all 300 are reserved
    for gateway in gateways:
        await gateway.settle(answer_for(first, prompt_tokens=0, completion_tokens=0))
    assert await admit(gateways[0], world)
    assert (await refusal_of(admit(gateways[0], world))).status == 429


async def test_an_answer_of_more_than_a_minutes_tokens_waits_for_a_full_bucket(gateways, world, monkeypatch):
    stretch_the_minute(monkeypatch, gateways)
    await limit(gateways, world, tokens_per_minute=100)
    ticket = await admit(gateways[0], world)
    await gateways[0].settle(answer_for(ticket, prompt_tokens=100, completion_tokens=50))
    refusal = await refusal_of(admit(gateways[0], world))
    # 50 below zero, and the next one needs all 100: one and a half of the stretched minute.
    assert 5390 <= refusal.retry_after_s <= 5400


# --- released on every way out --------------------------------------------------------------------


@pytest.mark.parametrize("way", ["settle", "abandon"])
async def test_an_answer_that_ends_makes_room(gateways, world, redis_client, way):
    await limit(gateways, world, concurrent_answers=1)
    ticket = await admit(gateways[0], world)
    if way == "settle":
        await gateways[0].settle(answer_for(ticket))
    else:
        await gateways[0].abandon(ticket.request_id, ticket.record)
    assert await open_answers(redis_client, world) == 0
    assert await admit(gateways[1], world)


async def test_a_request_that_was_never_started_does_not_count(gateways, world):
    await limit(gateways, world, requests_per_minute=1)
    ticket = await admit(gateways[0], world)
    assert (await refusal_of(admit(gateways[1], world))).status == 429
    await gateways[0].abandon(ticket.request_id, ticket.record)
    ticket = await admit(gateways[1], world)
    await gateways[1].settle(answer_for(ticket))
    assert (await refusal_of(admit(gateways[0], world))).status == 429


async def test_a_refusal_of_the_limit_holds_no_credit(gateways, world):
    await limit(gateways, world, concurrent_answers=1)
    await admit(gateways[0], world)
    before = await held(world)
    assert (await refusal_of(admit(gateways[0], world))).status == 429
    assert await held(world) == before


async def test_abandoning_what_a_limit_refused_asks_nothing_of_postgresql(gateways, world, caplog):
    await limit(gateways, world, concurrent_answers=1)
    ticket = await admit(gateways[0], world)
    refused = str(uuid.uuid4())
    assert (await refusal_of(admit(gateways[0], world, request_id=refused))).status == 429
    async with database_away(world):
        await gateways[0].abandon(refused, {})
        assert "left to expire" not in caplog.text
        await gateways[0].abandon(ticket.request_id, ticket.record)
        assert "left to expire" in caplog.text


async def test_a_refusal_of_the_credit_takes_nothing_of_the_limits(gateways, world, redis_client):
    await limit(gateways, world, requests_per_minute=1, tokens_per_minute=8_000, concurrent_answers=1)
    refusal = await refusal_of(admit(gateways[0], world, completion_tokens_max=7_000))
    assert refusal.status == 402
    assert await open_answers(redis_client, world) == 0
    assert await admit(gateways[1], world)


async def test_a_request_that_is_cancelled_while_it_is_admitted_takes_nothing(
    gateways, world, redis_client, monkeypatch
):
    await limit(gateways, world, concurrent_answers=1)
    reached = asyncio.Event()

    async def never(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(gateways[0], "_hold", never)
    admitting = asyncio.create_task(admit(gateways[0], world))
    await asyncio.wait_for(reached.wait(), 10)
    assert await open_answers(redis_client, world) == 1
    admitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admitting
    assert await open_answers(redis_client, world) == 0


_VICTIM = """
import asyncio, sys, uuid
import django
django.setup()
from brokerage.admission import BrokerageAdmission
from kernel_steer.admission import Caller

async def main():
    admission = BrokerageAdmission()
    await admission.start()
    await admission.admit(Caller(*sys.argv[1:]), request_id=str(uuid.uuid4()), model="gemma",
                          prompt_tokens_max=1, completion_tokens_max=1)
    print("admitted", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_gateways_answers_are_free_when_their_leases_end(gateways, world, redis_client):
    await limit(gateways, world, concurrent_answers=1)
    victim = _another_gateway(world)
    try:
        assert await asyncio.to_thread(victim.stdout.readline) == "admitted\n"
        assert (await refusal_of(admit(gateways[0], world))).status == 429
    finally:
        victim.kill()
        await asyncio.to_thread(victim.communicate)
    # The lease as it will be when its time is over; nobody is there to renew it.
    _, opened, _ = keys_of(str(world.key.pk))
    (lease,) = redis_client.zrange(opened, 0, -1)
    assert 0 < redis_client.zscore(opened, lease) - _now_ms(redis_client) <= limits.LEASE_S * 1000
    redis_client.zadd(opened, {lease: _now_ms(redis_client)})
    assert await admit(gateways[0], world)
    assert lease not in redis_client.zrange(opened, 0, -1)


def _another_gateway(world: World) -> subprocess.Popen[str]:
    environment = os.environ | {"DATABASE_URL": database_url(world.database)}
    arguments = [sys.executable, "-c", _VICTIM, str(world.key.pk), str(world.customer.pk)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)


def _now_ms(client: redis.Redis) -> int:
    seconds, micros = client.time()
    return seconds * 1000 + micros // 1000


async def test_a_living_gateway_renews_its_leases(gateways, world, redis_client):
    await limit(gateways, world, concurrent_answers=2)
    ticket = await admit(gateways[0], world)
    _, opened, _ = keys_of(str(world.key.pk))
    redis_client.zadd(opened, {ticket.request_id: _now_ms(redis_client) + 100})
    await gateways[0]._rates.renew()
    assert redis_client.zscore(opened, ticket.request_id) > _now_ms(redis_client) + 5_000
    await gateways[0].settle(answer_for(ticket))
    await gateways[0]._rates.renew()
    assert await open_answers(redis_client, world) == 0


async def test_leases_that_redis_has_lost_come_back(gateways, world, redis_client):
    await limit(gateways, world, concurrent_answers=1)
    await admit(gateways[0], world)
    redis_client.flushall()
    await gateways[0]._rates.renew()
    assert (await refusal_of(admit(gateways[1], world))).status == 429


# --- Redis goes away ------------------------------------------------------------------------------


async def test_without_redis_requests_pass_with_one_line_and_money_is_still_kept(
    world, redis_client, settings, tmp_path, caplog
):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    await orm(lambda: set_key_limits(key=world.key, actor=None, **(_UNLIMITED | {"concurrent_answers": 1})))
    gateway = BrokerageAdmission()
    await gateway.start()
    try:
        with caplog.at_level(logging.WARNING, "brokerage.admission.limits"):
            passed = [await admit(gateway, world) for _ in range(3)]
            assert (await refusal_of(admit(gateway, world, completion_tokens_max=5_000))).status == 402
            await gateway.settle(answer_for(passed[0]))
        assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
            "Redis is away, rate limits are off"
        ]
    finally:
        await gateway.stop()


async def test_limits_are_on_again_when_redis_is_back(gateways, world, redis_client):
    await limit(gateways, world, concurrent_answers=2)
    rates = gateways[0]._rates
    rates._away = True  # as after a call that failed
    assert [await admit(gateways[0], world) for _ in range(2)]
    assert await open_answers(redis_client, world) == 0
    await rates._probe()
    await rates.renew()
    assert await open_answers(redis_client, world) == 2
    assert (await refusal_of(admit(gateways[1], world))).status == 429
