"""Idempotency-Keys of completions, in real PostgreSQL, as several gateways share them."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

from django.db.models import F

from brokerage.admission import BrokerageAdmission
from brokerage.models import KeptAnswer
from brokerage.services.kept import forget_kept_answers
from kernel_steer.admission import OnceKey, Outcome
from tests.brokerage import factories
from tests.brokerage.broker import admit, answer_for, database_away, orm, refusal_of

ANSWER = b"HTTP/1.1 200 OK\r\n\r\nhello"


def once(world, key="k", body=b"a" * 32):
    return OnceKey(str(world.key.pk), key, body)


def new_id() -> str:
    return str(uuid.uuid4())


async def lease_ends() -> None:
    await orm(lambda: KeptAnswer.objects.update(lease_until=datetime.now(UTC) - timedelta(seconds=1)))


async def test_the_stored_answer_is_everybodys_and_lasts_a_day(admission, world):
    first = new_id()
    assert await admission.begin_once(once(world), first) is None
    await admission.keep_once(first, ANSWER)
    other = BrokerageAdmission()
    await other.start()
    try:
        assert await other.begin_once(once(world), new_id()) == ANSWER
        reused = await refusal_of(other.begin_once(once(world, body=b"b" * 32), new_id()))
        assert (reused.status, reused.code) == (422, "idempotency_key_reused")
    finally:
        await other.stop()
    await orm(lambda: KeptAnswer.objects.update(created_at=F("created_at") - timedelta(hours=24)))
    assert await admission.begin_once(once(world, body=b"b" * 32), new_id()) is None


async def test_keys_belong_to_an_api_key(admission, world):
    first = new_id()
    await admission.begin_once(once(world), first)
    await admission.keep_once(first, ANSWER)
    stranger, _ = await orm(lambda: factories.make_key(factories.make_customer(name="Others")))
    assert await admission.begin_once(OnceKey(str(stranger.pk), "k", b"a" * 32), new_id()) is None


async def test_of_many_gateways_at_once_one_answers(admission, world):
    brokers = [admission, BrokerageAdmission(), BrokerageAdmission()]
    for broker in brokers[1:]:
        await broker.start()
    try:
        asked = [broker.begin_once(once(world), new_id()) for broker in brokers for _ in range(4)]
        results = await asyncio.gather(*asked, return_exceptions=True)
    finally:
        for broker in brokers[1:]:
            await broker.stop()
    assert results.count(None) == 1
    refused = [result for result in results if result is not None]
    assert {(each.status, each.code) for each in refused} == {(409, "idempotency_in_flight")}
    assert all(0 < each.retry_after_s <= 15 for each in refused)


async def test_the_key_of_a_killed_gateway_is_taken_over_and_its_late_words_do_not_count(admission, world):
    lost, second = new_id(), new_id()
    await admission.begin_once(once(world), lost)
    await lease_ends()
    assert (await refusal_of(admission.begin_once(once(world, body=b"b" * 32), new_id()))).status == 422
    assert await admission.begin_once(once(world), second) is None
    await admission.keep_once(lost, b"late")
    await admission.forget_once(lost)
    await admission.keep_once(second, ANSWER)
    assert await admission.begin_once(once(world), new_id()) == ANSWER


async def test_what_is_under_way_keeps_its_lease(admission, world):
    await admission.begin_once(once(world), new_id())
    await lease_ends()
    await admission._once.renew()
    assert (await refusal_of(admission.begin_once(once(world), new_id()))).status == 409


async def test_a_recovered_answer_frees_its_key_at_once(admission, world):
    ticket = await admit(admission, world)
    await admission.begin_once(once(world), ticket.request_id)
    await admission.settle(answer_for(ticket, outcome=Outcome.RECOVERED))
    assert await admission.begin_once(once(world), new_id()) is None


async def test_what_was_too_long_is_neither_made_nor_charged_again(admission, world):
    first = new_id()
    await admission.begin_once(once(world), first)
    await admission.keep_once(first, None)
    refusal = await refusal_of(admission.begin_once(once(world), new_id()))
    assert (refusal.status, refusal.code) == (409, "idempotency_answer_not_kept")


async def test_without_postgresql_nothing_is_answered_on_trust_and_nothing_is_lost(admission, world):
    first = new_id()
    await admission.begin_once(once(world), first)
    async with database_away(world):
        assert (await refusal_of(admission.begin_once(once(world, "other"), new_id()))).status == 503
        keeping = asyncio.ensure_future(admission.keep_once(first, ANSWER))
    await keeping
    assert await admission.begin_once(once(world), new_id()) == ANSWER


async def test_the_store_keeps_to_its_bounds(admission, world):
    for number in range(4):
        request_id = new_id()
        await admission.begin_once(once(world, f"k{number}"), request_id)
        await admission.keep_once(request_id, ANSWER)
    await admission.begin_once(once(world, "under way"), new_id())
    await orm(lambda: KeptAnswer.objects.filter(key="k0").update(created_at=datetime(2026, 1, 1, tzinfo=UTC)))
    assert await orm(lambda: forget_kept_answers(key_bytes_max=2 * len(ANSWER))) == (1, 1)
    assert (await refusal_of(admission.begin_once(once(world, "k1"), new_id()))).status == 409
    for key in ("k2", "k3"):
        assert await admission.begin_once(once(world, key), new_id()) == ANSWER
