"""Budgets of keys and customers: two gateways, real PostgreSQL."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.urls import reverse

from brokerage.admission import BrokerageAdmission
from brokerage.models import Budget, BudgetedHold, Customer, UsageEvent
from brokerage.services.budgets import BudgetStatus, budget_status, remove_budget, set_budget, set_time_zone
from brokerage.services.charging import charge_usage
from kernel_steer.admission import Refusal, Ticket
from ledger.models import Hold
from ledger.selectors import wallet
from ledger.services import expire_due_holds
from tests.brokerage import factories
from tests.brokerage.broker import World, admit, answer_for, database_away, orm, refusal_of, world
from tests.brokerage.test_limits import patience
from tests.services import database_url

__all__ = ["patience", "world"]  # fixtures

# What one request holds in these tests (100 x 0.0001 + 50 x 0.0002), and what `answer_for` is charged.
HELD, CHARGED = Decimal("0.02"), Decimal("0.016")


@pytest.fixture
async def gateways(world: World) -> AsyncIterator[list[BrokerageAdmission]]:
    brokers = [BrokerageAdmission(), BrokerageAdmission()]
    for broker in brokers:
        await broker.start()
    yield brokers
    for broker in brokers:
        await broker.stop()


def budget(world: World, amount: str, **changes: Any) -> Budget:
    wanted = {"customer": world.customer, "period": Budget.Period.MONTHLY, "actor": None} | changes
    return set_budget(amount=Decimal(amount), **wanted)


def status(of: Budget) -> BudgetStatus:
    return budget_status(of.customer)[of.pk]


async def standing(of: Budget) -> tuple[Decimal, Decimal]:
    """(spent, held)"""
    now = await orm(lambda: status(of))
    return now.spent, now.held


async def answered(gateway: BrokerageAdmission, world: World, **changes: Any) -> Ticket:
    """An answer that is done and charged."""
    ticket = await admit(gateway, world)
    await gateway.settle(answer_for(ticket, started_at=_now(), finished_at=_now(), **changes))
    assert await orm(lambda: charge_usage(limit=100)) == 1
    return ticket


def _now() -> datetime:
    return datetime.now(UTC)


# --- never more than the budget -------------------------------------------------------------------


@pytest.mark.parametrize("of_key", [True, False], ids=["key", "customer"])
async def test_100_at_once_over_two_gateways_never_hold_more_than_the_budget(
    patience, gateways, world, of_key
):
    mine = await orm(lambda: budget(world, "0.30", api_key=world.key if of_key else None))
    attempts = [admit(gateways[number % 2], world) for number in range(100)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Refusal)]
    assert len(refused) == 85
    assert {(r.status, r.code) for r in refused} == {(429, "budget_exceeded")}
    assert await standing(mine) == (0, Decimal("0.30"))
    assert await orm(Hold.objects.count) == 15
    assert (await orm(lambda: wallet(world.customer.wallet_code))).held == Decimal("0.30")


async def test_the_counter_equals_the_books_after_a_storm(patience, gateways, world):
    """Answers that are admitted, charged, abandoned and left open, all at once, beside a change of the budget."""
    mine = await orm(lambda: budget(world, "0.90"))
    left_open = 0

    async def one(number: int) -> None:
        nonlocal left_open
        gateway = gateways[number % 2]
        ticket = await admit(gateway, world)
        match number % 4:
            case 0:
                left_open += 1
            case 1:
                await gateway.abandon(ticket.request_id, ticket.record)
            case _:
                await gateway.settle(answer_for(ticket, started_at=_now(), finished_at=_now()))

    async def charge() -> None:
        for _ in range(20):
            await orm(lambda: charge_usage(limit=3))

    async def change() -> None:
        for cents in range(91, 99):
            await orm(lambda cents=cents: budget(world, f"0.{cents}"))

    await asyncio.gather(*[one(number) for number in range(40)], charge(), charge(), change())
    while await orm(lambda: charge_usage(limit=100)):
        pass
    spent, held = await standing(mine)
    assert await orm(lambda: charge_usage(limit=100)) == 0
    assert (spent, held) == (20 * CHARGED, left_open * HELD) == (Decimal("0.32"), Decimal("0.2"))
    assert held == (await orm(lambda: wallet(world.customer.wallet_code))).held
    await admit(gateways[0], world)  # folds
    assert await standing(mine) == (spent, held + HELD)


async def test_a_refusal_names_the_budget_and_when_it_begins_anew(gateways, world):
    def prepare() -> Budget:
        set_time_zone(customer=world.customer, time_zone="Europe/Berlin", actor=None)
        return budget(world, "0.03", api_key=world.key, period=Budget.Period.DAILY)

    mine = await orm(prepare)
    await answered(gateways[0], world)
    refusal = await refusal_of(admit(gateways[1], world))
    end = (await orm(lambda: status(mine))).window_end
    local = end.astimezone(ZoneInfo("Europe/Berlin"))
    assert (local.hour, local.minute) == (0, 0)
    assert refusal.message == (
        "The daily budget of this API key does not allow this request: it can cost up to 0.02 USD; of 0.03 USD,"
        f" 0.016 is spent and 0 is held for answers under way. The budget begins anew at {local.isoformat()}"
        " (Europe/Berlin)."
    )
    assert 0 < refusal.retry_after_s <= (end - _now()).total_seconds() + 60


async def test_what_only_waits_for_answers_under_way_may_be_tried_again_soon(gateways, world):
    await orm(lambda: budget(world, "0.03"))
    await admit(gateways[0], world)
    refusal = await refusal_of(admit(gateways[0], world))
    assert refusal.retry_after_s == 5
    assert "0.02 is held for answers under way. Try again when they have ended" in refusal.message


async def test_a_request_that_never_fits_is_told_so(gateways, world):
    await orm(lambda: budget(world, "0.01"))
    refusal = await refusal_of(admit(gateways[0], world))
    assert "too large for it even then" in refusal.message


async def test_of_two_budgets_the_tighter_decides(gateways, world):
    await orm(lambda: budget(world, "0.50"))
    await orm(lambda: budget(world, "0.02", api_key=world.key))
    await admit(gateways[0], world)
    assert "of this API key" in (await refusal_of(admit(gateways[1], world))).message
    other, _ = await orm(lambda: factories.make_key(world.customer))
    elsewhere = World(world.database, world.customer, other, "", world.price, world.node)
    assert await admit(gateways[1], elsewhere)


async def test_a_budget_of_the_customer_counts_all_its_keys(gateways, world):
    await orm(lambda: budget(world, "0.03"))
    other, _ = await orm(lambda: factories.make_key(world.customer))
    await admit(gateways[0], World(world.database, world.customer, other, "", world.price, world.node))
    assert "of your account" in (await refusal_of(admit(gateways[1], world))).message


async def test_a_budget_of_zero_lets_nothing_pass_that_costs(gateways, world):
    await orm(lambda: budget(world, "0"))
    assert (await refusal_of(admit(gateways[0], world))).status == 429


async def test_the_same_request_counts_once(gateways, world):
    mine = await orm(lambda: budget(world, "0.03"))
    request_id = str(uuid.uuid4())
    first, second = [await admit(gateway, world, request_id=request_id) for gateway in gateways]
    assert first == second
    assert await standing(mine) == (0, HELD)


# --- released on every way out --------------------------------------------------------------------


async def test_a_charged_answer_counts_what_it_cost(gateways, world):
    mine = await orm(lambda: budget(world, "1"))
    await answered(gateways[0], world)
    assert await standing(mine) == (CHARGED, 0)
    await admit(gateways[0], world)  # folds
    assert await standing(mine) == (CHARGED, HELD)
    assert await orm(BudgetedHold.objects.count) == 1


@pytest.mark.parametrize("way", ["abandoned", "nothing delivered", "expired"])
async def test_what_costs_nothing_counts_nothing(gateways, world, way):
    mine = await orm(lambda: budget(world, "0.03"))
    if way == "abandoned":
        ticket = await admit(gateways[0], world)
        await gateways[0].abandon(ticket.request_id, ticket.record)
    elif way == "nothing delivered":
        await answered(gateways[0], world, completion_tokens=0)
    else:
        await admit(gateways[0], world)
        await expire_holds(world)
    assert await standing(mine) == (0, 0)
    assert await admit(gateways[1], world)
    assert await standing(mine) == (0, HELD)


async def expire_holds(world: World) -> None:
    """As 15 minutes later. Only the owner of the ledger may move its times."""
    import psycopg

    from apex.local.postgres import SUPERUSER

    url = database_url(world.database, SUPERUSER)
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as owner:
        await owner.execute("SET session_replication_role = replica")
        await owner.execute(
            "UPDATE ledger_hold SET expires_at = now() - interval '1 second' WHERE state = 'open'"
        )
    assert await orm(lambda: expire_due_holds(limit=100)) >= 1


async def test_an_answer_that_is_charged_after_its_hold_expired_counts(gateways, world):
    mine = await orm(lambda: budget(world, "1"))
    ticket = await admit(gateways[0], world)
    await expire_holds(world)
    await admit(gateways[0], world)  # whatever is folded here must not lose the late answer
    await gateways[0].settle(answer_for(ticket))
    assert await orm(lambda: charge_usage(limit=100)) == 1
    assert await standing(mine) == (CHARGED, HELD)
    await admit(gateways[0], world)
    assert await standing(mine) == (CHARGED, 2 * HELD)


async def test_a_refusal_of_the_budget_leaves_nothing_behind(gateways, world):
    await orm(lambda: budget(world, "0"))
    await refusal_of(admit(gateways[0], world))
    assert await orm(lambda: (Hold.objects.count(), BudgetedHold.objects.count())) == (0, 0)
    assert (await orm(lambda: wallet(world.customer.wallet_code))).held == 0


async def test_without_postgresql_no_budget_is_taken_on_trust(gateways, world):
    mine = await orm(lambda: budget(world, "1"))
    async with database_away(world):
        assert (await refusal_of(admit(gateways[0], world))).status == 503
    assert await standing(mine) == (0, 0)


# --- windows --------------------------------------------------------------------------------------


async def test_a_new_window_begins_with_nothing_spent(gateways, world):
    mine = await orm(lambda: budget(world, "0.03", period=Budget.Period.DAILY))
    await answered(gateways[0], world)
    await admit(gateways[0], world, completion_tokens_max=20)  # 0.014: still under way
    assert (await refusal_of(admit(gateways[0], world))).status == 429
    await orm(lambda: _let_a_day_pass(mine))
    assert await standing(mine) == (0, 0)
    assert await admit(gateways[0], world)
    assert await standing(mine) == (0, HELD)


def _let_a_day_pass(mine: Budget) -> None:
    day = timedelta(days=1)
    stored = Budget.objects.get(pk=mine.pk)
    Budget.objects.filter(pk=mine.pk).update(window_start=stored.window_start - day)
    for row in BudgetedHold.objects.all():
        BudgetedHold.objects.filter(pk=row.pk).update(admitted_at=row.admitted_at - day)


async def test_a_budget_that_is_made_in_mid_window_knows_what_was_spent(gateways, world):
    await answered(gateways[0], world)
    open_ticket = await admit(gateways[0], world)
    of_key = await orm(lambda: budget(world, "1", api_key=world.key))
    of_all = await orm(lambda: budget(world, "1", period=Budget.Period.DAILY))
    for mine in (of_key, of_all):
        assert await standing(mine) == (CHARGED, HELD)
    await gateways[0].settle(answer_for(open_ticket, started_at=_now(), finished_at=_now()))
    await orm(lambda: charge_usage(limit=100))
    for mine in (of_key, of_all):
        assert await standing(mine) == (2 * CHARGED, 0)


async def test_counting_anew_changes_nothing(gateways, world):
    mine = await orm(lambda: budget(world, "1"))
    await answered(gateways[0], world)
    await answered(gateways[0], world)
    await admit(gateways[0], world)
    before = await standing(mine)
    await orm(lambda: budget(world, "2"))
    assert await standing(mine) == before == (2 * CHARGED, HELD)


async def test_another_time_zone_moves_the_window(gateways, world):
    mine = await orm(lambda: budget(world, "1"))
    await answered(gateways[0], world)
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):
        await orm(lambda zone=zone: set_time_zone(customer=world.customer, time_zone=zone, actor=None))
        now = await orm(lambda: status(mine))
        local = now.window_start.astimezone(ZoneInfo(zone))
        assert (local.day, local.hour) == (1, 0)
        (usage,) = await orm(lambda: list(UsageEvent.objects.all()))
        assert now.spent == (CHARGED if usage.started_at >= now.window_start else 0)


async def test_removing_the_last_budget_and_setting_one_again(gateways, world):
    mine = await orm(lambda: budget(world, "0.03"))
    await admit(gateways[0], world)
    assert await orm(lambda: remove_budget(budget=mine, actor=None))
    assert not await orm(lambda: remove_budget(budget=mine, actor=None))
    await admit(gateways[0], world)
    again = await orm(lambda: budget(world, "0.05"))
    assert await standing(again) == (0, 2 * HELD)


# --- services and back office ---------------------------------------------------------------------

pages = pytest.mark.django_db


@pages
def test_a_key_of_another_customer_is_refused():
    stranger, _ = factories.make_key(factories.make_customer(name="Others"))
    with pytest.raises(ValidationError) as caught:
        set_budget(
            customer=factories.make_customer(),
            api_key=stranger,
            period=Budget.Period.DAILY,
            amount=Decimal(1),
            actor=None,
        )
    assert list(caught.value.message_dict) == ["api_key"]


@pages
@pytest.mark.parametrize("name", ["", "Mars/Olympus", "CET0", "'; --"])
def test_a_zone_that_does_not_exist_is_refused(name):
    customer = factories.make_customer()
    with pytest.raises(ValidationError) as caught:
        set_time_zone(customer=customer, time_zone=name, actor=None)
    assert list(caught.value.message_dict) == ["time_zone"]
    assert Customer.objects.get().time_zone == "UTC"


@pages
def test_the_application_cannot_lock_the_ledger_by_itself():
    from django.db import ProgrammingError, transaction

    with pytest.raises(ProgrammingError, match="permission denied"), transaction.atomic():
        connection.cursor().execute("SELECT 1 FROM ledger_balance FOR NO KEY UPDATE")


@pages
def test_staff_set_change_and_remove_a_budget(client):
    client.force_login(factories.make_staff())
    customer = factories.make_customer()
    key, _ = factories.make_key(customer)
    form = {"customer": customer.pk, "api_key": key.pk, "period": "daily", "amount": "5"}
    assert client.post(reverse("admin:brokerage_budget_add"), form).status_code == 302
    mine = Budget.objects.get()
    assert client.post(reverse("admin:brokerage_budget_add"), form).status_code == 200  # there is one
    page = reverse("admin:brokerage_budget_change", args=[mine.pk])
    assert b"held for answers under way" in client.get(page).content
    assert client.post(page, {"amount": "7.5"}).status_code == 302
    mine.refresh_from_db()
    assert mine.amount == Decimal("7.5")
    assert b"7.5" in client.get(reverse("admin:brokerage_customer_change", args=[customer.pk])).content
    delete = reverse("admin:brokerage_budget_delete", args=[mine.pk])
    assert client.post(delete, {"post": "yes"}).status_code == 302
    assert not Budget.objects.exists()
    assert factories.audit_actions()[-3:] == ["budget.set", "budget.set", "budget.removed"]


@pages
def test_staff_change_the_time_zone_of_a_customer_and_nothing_else(client):
    client.force_login(factories.make_staff())
    customer = factories.make_customer()
    page = reverse("admin:brokerage_customer_change", args=[customer.pk])
    inlines = {
        f"{prefix}-{field}": 0
        for prefix in ("members", "projects", "api_keys", "budgets")
        for field in ("TOTAL_FORMS", "INITIAL_FORMS")
    }
    answer = client.post(page, {"time_zone": "Mars/Olympus", **inlines})
    assert b"is no time zone" in answer.content
    assert client.post(page, {"time_zone": "Europe/Berlin", "name": "x", **inlines}).status_code == 302
    customer.refresh_from_db()
    assert (customer.time_zone, customer.name) == ("Europe/Berlin", "Engines")
    assert factories.audit_actions()[-1] == "customer.time_zone_changed"
