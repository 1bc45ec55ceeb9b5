"""What the gateway asks, answered by real PostgreSQL."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import psycopg
import pytest

from apex.local.postgres import SUPERUSER
from brokerage.admission import BrokerageAdmission
from brokerage.admission.broker import REFRESH_S
from brokerage.models import APIKey, LegCost, Node, Reroute, UsageEvent
from brokerage.services.customers import suspend_customer
from brokerage.services.keys import make_key, revoke_key
from kernel_steer.admission import Caller, FlipReport, LegReport, Outcome, Refusal, Resume, Ticket
from ledger.models import Hold
from ledger.selectors import wallet
from tests.brokerage import factories
from tests.brokerage.broker import (
    NOW,
    admit,
    answer_for,
    database_away,
    eventually,
    orm,
    refusal_of,
    throw_out,
)  # fmt: skip
from tests.services import database_url

# --- who may call -------------------------------------------------------------------------------


async def test_a_good_key_is_recognised(admission, world):
    assert await admission.authenticate(world.bearer) == Caller(str(world.key.pk), str(world.customer.pk))
    assert await admission.authenticate(f"bearer {world.plaintext}") == Caller(
        str(world.key.pk), str(world.customer.pk)
    )


async def test_unknown_keys_are_refused_without_being_repeated(admission):
    for secret in (make_key(APIKey.Mode.LIVE), make_key(APIKey.Mode.LIVE)[:-1], "sk-other"):
        for _ in range(2):
            refusal = await refusal_of(admission.authenticate(f"Bearer {secret}"))
            assert (refusal.status, refusal.code) == (401, "invalid_api_key")
            assert secret not in refusal.message


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer apx_live_short", "Bearer \x00"]
)
async def test_malformed_headers_are_refused_without_a_database(header, postgres_server, django_db_setup):
    never_started = BrokerageAdmission()
    assert (await refusal_of(never_started.authenticate(header))).status == 401


async def test_a_new_key_works_at_once(admission, world):
    _, plaintext = await orm(lambda: factories.make_key(world.customer))
    assert (await admission.authenticate(f"Bearer {plaintext}")).customer_id == str(world.customer.pk)


async def test_a_new_customer_can_ask_at_once(admission, world):
    customer = await orm(lambda: factories.make_customer(credit="1", name="Newcomers"))
    _, plaintext = await orm(lambda: factories.make_key(customer))
    caller = await admission.authenticate(f"Bearer {plaintext}")
    ticket = await admission.admit(
        caller, request_id=str(uuid.uuid4()), model="gemma", prompt_tokens_max=10, completion_tokens_max=10
    )
    assert ticket.record["customer_id"] == str(customer.pk)


@pytest.mark.parametrize(
    "end",
    [
        lambda world: revoke_key(key=world.key, actor=None),
        lambda world: APIKey.objects.update(expires_at=datetime.now(UTC)),
        lambda world: suspend_customer(customer=world.customer, actor=factories.make_staff()),
    ],
    ids=["revoked", "expired", "suspended"],
)
async def test_an_ended_key_stops_working(admission, world, end):
    await admission.authenticate(world.bearer)
    await orm(lambda: end(world))

    async def is_refused() -> Refusal | None:
        try:
            await admission.authenticate(world.bearer)
        except Refusal as refusal:
            return refusal
        return None

    assert (await eventually(is_refused)).status == 401


async def test_a_revoked_key_ends_at_every_gateway_within_a_second(admission, world):
    other = BrokerageAdmission()
    await other.start()
    try:
        for gateway in (admission, other):
            await gateway.authenticate(world.bearer)
        await orm(lambda: revoke_key(key=world.key, actor=None))

        async def ended(gateway: BrokerageAdmission) -> bool:
            try:
                await gateway.authenticate(world.bearer)
            except Refusal as refusal:
                return refusal.status == 401
            return False

        # One refresh, which begins at most REFRESH_S after the one before, is all that it takes.
        assert REFRESH_S <= 0.5
        for gateway in (admission, other):
            await eventually(lambda gateway=gateway: ended(gateway))
    finally:
        await other.stop()


async def test_a_key_expires_by_the_clock_without_any_refresh(world):
    await orm(lambda: APIKey.objects.update(expires_at=datetime.now(UTC) + timedelta(seconds=0.3)))
    admission = BrokerageAdmission()
    await admission.start()
    try:
        await admission.authenticate(world.bearer)
        async with database_away(world):

            async def is_refused() -> bool:
                try:
                    await admission.authenticate(world.bearer)
                except Refusal as refusal:
                    return refusal.status == 401
                return False

            assert await eventually(is_refused)
    finally:
        await admission.stop()


# --- credit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capabilities", [["ids"], ["ids", "reasoning"]])
async def test_a_model_reasons_when_one_of_its_nodes_says_so(world, capabilities):
    """Also in a pool that was decided before nodes said it."""
    await orm(lambda: Node.objects.update(capabilities=capabilities))
    admission = BrokerageAdmission()
    await admission.start()
    caller = Caller(str(world.key.pk), str(world.customer.pk))
    (card,) = await admission.list_models(caller)
    assert card.reasoning is ("reasoning" in capabilities)
    assert (await admit(admission, world)).model == card
    await admission.stop()


async def test_credit_is_held_for_the_most_that_it_can_cost(admission, world):
    ticket = await admit(admission, world)
    hold = await orm(lambda: Hold.objects.get(pk=ticket.record["hold_id"]))
    assert hold.amount.amount == Decimal("0.02")  # 100 x 0.0001 + 50 x 0.0002
    assert timedelta(minutes=14) < hold.expires_at - datetime.now(UTC) <= timedelta(minutes=15)
    assert ticket.record == {
        "customer_id": str(world.customer.pk),
        "key_id": str(world.key.pk),
        "served_model_id": world.price.served_model_id,
        "price_id": world.price.pk,
        "hold_id": hold.pk,
        "currency": "USD",
    }
    assert (ticket.model.name, ticket.model.context_tokens, ticket.completion_tokens_max) == (
        "gemma",
        1000,
        50,
    )


async def test_without_a_limit_the_hold_is_for_a_full_context(admission, world):
    ticket = await admit(admission, world, completion_tokens_max=None)
    hold = await orm(lambda: Hold.objects.get(pk=ticket.record["hold_id"]))
    assert hold.amount.amount == Decimal("0.21")  # 100 x 0.0001 + 1000 x 0.0002
    assert ticket.completion_tokens_max == 1000


async def test_a_limit_beyond_all_reason_is_held_for_as_what_can_happen(admission, world):
    refusal = await refusal_of(admit(admission, world, completion_tokens_max=10**30))
    assert refusal.status == 402
    assert "up to 3.21 USD" in refusal.message  # 100 x 0.0001 + 16 x 1000 x 0.0002


async def test_asking_again_for_the_same_request_holds_once(admission, world):
    request_id = str(uuid.uuid4())
    first, second = [await admit(admission, world, request_id=request_id) for _ in range(2)]
    assert first == second
    assert await orm(Hold.objects.count) == 1


async def test_an_empty_wallet_is_told_what_is_missing(admission, world):
    await admit(admission, world, completion_tokens_max=4_000)  # 0.81
    refusal = await refusal_of(admit(admission, world, completion_tokens_max=1_000))  # 0.21, 0.19 left
    assert (refusal.status, refusal.code) == (402, "insufficient_quota")
    assert "0.21 USD" in refusal.message
    assert "0.19 is available, 0.02 is missing" in refusal.message


async def test_many_at_once_never_hold_more_than_there_is(admission, world):
    results = await asyncio.gather(
        *[admit(admission, world, completion_tokens_max=950) for _ in range(12)], return_exceptions=True
    )  # 0.20 each
    assert sum(isinstance(result, Ticket) for result in results) == 5
    assert all(result.status == 402 for result in results if isinstance(result, Refusal))
    assert (await orm(lambda: wallet(world.customer.wallet_code))).available == 0


async def test_unknown_model(admission, world):
    refusal = await refusal_of(admit(admission, world, model="gpt-5"))
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")


async def test_a_model_without_a_price_in_the_customers_currency_is_not_sold(admission, world):
    await orm(lambda: factories.make_model("unpriced"))
    cards = await admission.list_models(Caller(str(world.key.pk), str(world.customer.pk)))
    assert [(card.name, card.context_tokens, card.owned_by) for card in cards] == [("gemma", 1000, "apex")]


async def test_a_prompt_that_cannot_fit_is_refused_before_any_hold(admission, world):
    refusal = await refusal_of(admit(admission, world, prompt_tokens_max=16_001))
    assert (refusal.status, refusal.code, refusal.param) == (400, "context_length_exceeded", "messages")
    assert "1000 tokens" in refusal.message
    assert await orm(Hold.objects.count) == 0


async def test_an_abandoned_request_has_nothing_held(admission, world):
    ticket = await admit(admission, world)
    await admission.abandon(ticket.request_id, ticket.record)
    await admission.abandon(ticket.request_id, ticket.record)
    await admission.abandon(str(uuid.uuid4()), {})
    assert (await orm(lambda: wallet(world.customer.wallet_code))).held == 0


# --- where it goes ------------------------------------------------------------------------------


async def test_nodes_follow_the_database(admission, world):
    node = admission.choose_node("gemma")
    assert (node.name, node.epoch, node.host, node.port) == ("node-a", 7, "127.0.0.1", 9001)
    await orm(lambda: Node.objects.update(state="gone"))

    async def nobody() -> bool:
        return admission.choose_node("gemma") is None

    assert await eventually(nobody)


async def test_how_a_node_can_be_gone_on_with_comes_from_what_it_reported(admission, world):
    assert admission.choose_node("gemma").resume is Resume.IDS
    await orm(lambda: Node.objects.update(capabilities=["text"]))

    async def by_text() -> bool:
        return admission.choose_node("gemma").resume is Resume.TEXT

    assert await eventually(by_text)


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ({"state": "gone"}, True),  # silent for some seconds: perhaps only its heartbeats are late
        ({"state": "gone", "drained_epoch": 7}, False),  # it was taken away
        ({"state": "gone", "last_seen_at": "long ago"}, False),
        ({"state": "draining"}, False),
    ],
    ids=["silent", "evicted", "long-gone", "draining"],
)
async def test_a_node_that_only_fell_silent_is_kept_as_a_last_resort(admission, world, change, given):
    seen = datetime.now(UTC) - (timedelta(minutes=10) if "last_seen_at" in change else timedelta(seconds=20))
    await orm(lambda: Node.objects.create(**_OTHER_NODE, served_model=world.node.served_model))
    await orm(lambda: Node.objects.filter(name="node-a").update(**(change | {"last_seen_at": seen})))

    async def the_other_first() -> bool:
        return admission.choose_node("gemma").name == "node-z"

    assert await eventually(the_other_first)
    last = admission.choose_node("gemma", exclude=frozenset({"node-z"}))
    assert (last is not None and last.name == "node-a") is given


_OTHER_NODE = {"name": "node-z", "state": "ready", "epoch": 1, "host": "127.0.0.1", "port": 9009}


async def test_a_signal_is_obeyed_before_the_database_knows(admission):
    admission.node_draining("node-a", 7)
    assert admission.choose_node("gemma") is None


async def test_a_cancelled_eviction_gives_the_node_back_at_once(admission):
    admission.node_draining("node-a", 7)
    admission.node_restored("node-a", 7)
    assert admission.choose_node("gemma").name == "node-a"


async def test_a_node_is_known_in_whatever_state_and_nobody_else_is(admission, world):
    await orm(lambda: Node.objects.update(state="gone"))

    async def gone() -> bool:
        return admission.choose_node("gemma") is None

    assert await eventually(gone)
    assert admission.knows_node("node-a")
    assert not admission.knows_node("nobody")


async def test_a_failed_node_is_avoided(admission):
    admission.node_failed("node-a", 7, "reset")
    assert admission.choose_node("gemma") is None


# --- what was delivered -------------------------------------------------------------------------


async def test_usage_is_stored_when_settle_returns(admission, world):
    ticket = await admit(admission, world)
    await admission.settle(answer_for(ticket))
    usage = await orm(UsageEvent.objects.get)
    assert str(usage.request_id) == ticket.request_id
    assert (usage.customer_id, usage.api_key_id, usage.price_id) == (
        world.customer.pk,
        world.key.pk,
        world.price.pk,
    )
    assert (usage.prompt_tokens, usage.completion_tokens, usage.outcome) == (80, 40, "completed")
    assert (usage.hold_id, usage.charged_at, usage.finished_at - usage.started_at) == (
        ticket.record["hold_id"],
        None,
        timedelta(seconds=2),
    )
    legs = await orm(
        lambda: list(LegCost.objects.values_list("number", "node", "completion_tokens", "ended"))
    )
    assert legs == [(1, "node-a", 15, "reset"), (2, "node-b", 25, "completed")]


async def test_settling_again_after_a_crash_counts_once(admission, world):
    ticket = await admit(admission, world)
    await admission.settle(answer_for(ticket))
    again = answer_for(
        ticket,
        outcome=Outcome.RECOVERED,
        completion_tokens=39,
        legs=[LegReport(1, "unknown", 80, 39, "gateway_lost")],
    )
    await admission.settle(again)
    usage = await orm(UsageEvent.objects.get)
    assert (usage.outcome, usage.completion_tokens) == ("completed", 40)
    assert await orm(LegCost.objects.count) == 2


async def test_many_answers_are_written_together(admission, world):
    ticket = await admit(admission, world)
    answers = [answer_for(ticket, request_id=str(uuid.uuid4())) for _ in range(700)]
    await asyncio.gather(*[admission.settle(answer) for answer in answers])
    stored = await orm(lambda: {str(pk) for pk in UsageEvent.objects.values_list("pk", flat=True)})
    assert stored == {answer.request_id for answer in answers}


async def test_a_clock_that_was_set_back_loses_no_usage(admission, world):
    ticket = await admit(admission, world)
    await admission.settle(answer_for(ticket, finished_at=NOW - timedelta(hours=1)))
    assert (await orm(UsageEvent.objects.get)).finished_at == NOW


async def test_a_record_that_leads_nowhere_does_not_hold_up_the_others(admission, world):
    ticket = await admit(admission, world)
    good = [answer_for(ticket, request_id=str(uuid.uuid4())) for _ in range(3)]
    stranger = answer_for(
        ticket, request_id=str(uuid.uuid4()), record=ticket.record | {"customer_id": str(uuid.uuid4())}
    )
    torn = answer_for(ticket, request_id=str(uuid.uuid4()), record={})
    results = await asyncio.gather(
        *[admission.settle(answer) for answer in [*good, stranger, torn]], return_exceptions=True
    )
    assert results[:3] == [None] * 3
    assert all(isinstance(result, ValueError) for result in results[3:])
    assert await orm(UsageEvent.objects.count) == 3


async def test_workers_are_told_that_there_is_usage(admission, world, redis_client):
    ticket = await admit(admission, world)
    await admission.settle(answer_for(ticket))

    async def message() -> bytes | None:
        return redis_client.lindex("celery", 0)

    assert "brokerage.tasks.charge_usage" in await eventually(message)


async def test_a_flip_is_stored_and_completed(admission, world):
    report = FlipReport("node-a", 7, NOW, NOW + timedelta(milliseconds=1), flows=8)
    await admission.report_flip(report)
    complete = FlipReport(
        "node-a",
        7,
        NOW - timedelta(seconds=1),
        NOW + timedelta(seconds=9),
        3,
        NOW + timedelta(milliseconds=4),
    )
    await admission.report_flip(complete)
    await admission.report_flip(report)
    await admission.report_flip(FlipReport("nobody", 1, NOW, NOW, 0))
    row = await orm(Reroute.objects.get)
    assert (row.signal_at, row.flipped_at, row.first_byte_at, row.flows) == (
        NOW - timedelta(seconds=1),
        NOW + timedelta(milliseconds=1),
        NOW + timedelta(milliseconds=4),
        8,
    )


# --- PostgreSQL goes away -----------------------------------------------------------------------


async def test_without_postgresql_known_keys_work_and_credit_is_refused(admission, world):
    stranger = make_key(APIKey.Mode.LIVE)
    async with database_away(world):
        assert (await admission.authenticate(world.bearer)).key_id == str(world.key.pk)
        assert admission.choose_node("gemma") is not None
        for attempt in (admit(admission, world), admission.authenticate(f"Bearer {stranger}")):
            refusal = await refusal_of(attempt)
            assert (refusal.status, refusal.retry_after_s) == (503, 2)

    async def is_admitted() -> bool:
        try:
            await admit(admission, world)
        except Refusal:
            return False
        return True

    assert await eventually(is_admitted)


async def test_known_keys_are_not_trusted_for_ever(admission, world, monkeypatch):
    monkeypatch.setattr("brokerage.admission.keys.TRUST_WITHOUT_DATABASE_S", 0.2)
    async with database_away(world):

        async def is_refused() -> bool:
            try:
                await admission.authenticate(world.bearer)
            except Refusal as refusal:
                return refusal.status == 503
            return False

        assert await eventually(is_refused)


async def test_usage_waits_for_postgresql(admission, world):
    ticket = await admit(admission, world)
    async with database_away(world):
        settling = asyncio.create_task(admission.settle(answer_for(ticket)))
        assert (await refusal_of(admit(admission, world))).status == 503
        assert not settling.done()
    await asyncio.wait_for(settling, 10)
    assert await orm(UsageEvent.objects.count) == 1


async def test_stopping_leaves_unwritten_usage_to_the_journal(admission, world):
    ticket = await admit(admission, world)
    async with database_away(world):
        settling = asyncio.create_task(admission.settle(answer_for(ticket)))
        await asyncio.sleep(0)
        await admission.stop()
        with pytest.raises(asyncio.CancelledError):
            await settling


async def test_a_restart_of_postgresql_costs_no_request(admission, world):
    async with await psycopg.AsyncConnection.connect(
        database_url("postgres", SUPERUSER), autocommit=True
    ) as admin:
        for _ in range(3):
            await throw_out(admin, world)
            await admit(admission, world)
