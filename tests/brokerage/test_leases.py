"""Credit leases: many requests from one hold, on real PostgreSQL, never more than there is."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal

import psycopg
import pytest
from django.db import connection

from apex.local.postgres import SUPERUSER
from brokerage.admission import BrokerageAdmission, leases
from brokerage.admission.leases import BEGIN_AT
from brokerage.models import Budget, LeaseCall, UsageEvent
from brokerage.services.budgets import budget_status, set_budget
from brokerage.services.charging import charge_usage
from kernel_steer.admission import Outcome, Refusal, Ticket
from ledger.models import Hold
from ledger.selectors import wallet
from ledger.services import expire_due_holds
from ledger.verify import verify_books
from tests.brokerage import factories
from tests.brokerage.broker import World, admit, answer_for, database_away, eventually, orm
from tests.services import database_url

# What one request of these tests may cost (100 x 0.0001 + 50 x 0.0002), and what `answer_for` costs.
MOST, COST = Decimal("0.02"), Decimal("0.016")


@pytest.fixture
async def gateways(world: World) -> AsyncIterator[list[BrokerageAdmission]]:
    brokers = [BrokerageAdmission(), BrokerageAdmission()]
    for broker in brokers:
        await broker.start()
    yield brokers
    for broker in brokers:
        await broker.stop()


async def lease_of(gateway: BrokerageAdmission, world: World) -> list[Ticket]:
    """Asks until requests come from a lease; the tickets so far."""
    tickets: list[Ticket] = []

    async def leased() -> bool:
        tickets.append(await admit(gateway, world))
        return "rates" in tickets[-1].record

    await eventually(leased)
    return tickets


async def credit(world: World, amount: str) -> None:
    await orm(lambda: factories.give_credit(world.customer, amount))


async def purse(world: World):
    return await orm(lambda: wallet(world.customer.wallet_code))


async def books_agree(world: World) -> None:
    """held is what open holds have, and the books charge what usage says."""

    def look() -> None:
        with connection.cursor() as cursor:  # one statement: gateways take and return leases meanwhile
            cursor.execute(
                "SELECT b.held, (SELECT coalesce(sum(h.amount), 0) FROM ledger_hold h"
                " WHERE h.account_id = b.account_id AND h.state = 'open'), b.posted - b.held"
                " FROM ledger_balance b JOIN ledger_account a ON a.id = b.account_id WHERE a.code = %s",
                [world.customer.wallet_code],
            )
            held, of_holds, available = cursor.fetchone()
        assert held == of_holds
        assert available >= 0

    await orm(look)


async def charge_all() -> None:
    await orm(lambda: charge_usage(limit=1000))


async def test_a_wallet_that_is_asked_often_needs_no_database(gateways, world):
    await credit(world, "99")
    first, _ = gateways
    tickets = await lease_of(first, world)
    assert len(tickets) > BEGIN_AT
    before = await orm(Hold.objects.count)
    async with database_away(world):
        tickets += [await admit(first, world) for _ in range(20)]
    assert await orm(Hold.objects.count) == before
    await asyncio.gather(*[first.settle(answer_for(ticket)) for ticket in tickets])
    await charge_all()
    await books_agree(world)
    await first._leases.tidy(everything=True)
    now = await purse(world)
    assert (now.held, now.posted) == (0, 100 - len(tickets) * COST)
    assert await orm(UsageEvent.objects.filter(charged_at__isnull=True).count) == 0


async def test_few_requests_are_each_held_for_by_themselves(gateways, world):
    await credit(world, "99")
    tickets = [await admit(gateways[0], world) for _ in range(BEGIN_AT - 1)]
    assert not any("rates" in ticket.record for ticket in tickets)


async def test_asking_again_settling_twice_and_abandoning_count_once(gateways, world):
    await credit(world, "99")
    first, _ = gateways
    await lease_of(first, world)
    request_id = str(uuid.uuid4())
    one, two = [await admit(first, world, request_id=request_id) for _ in range(2)]
    assert one == two
    assert "rates" in one.record
    for _ in range(2):
        await first.settle(answer_for(one))
    assert (await orm(lambda: Hold.objects.get(key=request_id))).amount.amount == COST
    other = await admit(first, world)
    for _ in range(2):
        await first.abandon(other.request_id, other.record)
    assert not await orm(Hold.objects.filter(key=other.request_id).exists)
    await charge_all()
    await books_agree(world)


async def test_an_answer_of_which_nothing_was_delivered_costs_nothing(gateways, world):
    await credit(world, "99")
    ticket = (await lease_of(gateways[0], world))[-1]
    await gateways[0].settle(answer_for(ticket, outcome=Outcome.CLIENT_GONE, completion_tokens=0))
    await charge_all()
    usage = await orm(lambda: UsageEvent.objects.get(pk=ticket.request_id))
    assert (usage.amount, usage.journal_id, usage.hold_id) == (0, None, None)


async def test_of_a_hundred_requests_at_once_those_that_are_paid_for_are_admitted(gateways, world):
    """1 USD is 50 requests. The lease that the wallet had in better times is given back for them."""
    first, _ = gateways
    await credit(world, "9")
    tickets = await lease_of(first, world)
    await asyncio.gather(*[first.abandon(ticket.request_id, ticket.record) for ticket in tickets])
    await orm(lambda: _leave_free(world, Decimal(1)))
    results = await asyncio.gather(*[admit(first, world) for _ in range(100)], return_exceptions=True)
    assert sum(isinstance(result, Ticket) for result in results) == 50
    assert all(result.status == 402 for result in results if isinstance(result, Refusal))
    now = await purse(world)
    assert (now.posted, now.available) == (10, 0)


def _leave_free(world: World, amount: Decimal) -> None:
    """Holds everything but `amount`; what is leased but not used counts as free."""
    open_leases = Hold.objects.filter(state="open", key__startswith="lease:")
    leased = sum((lease.amount.amount for lease in open_leases), Decimal(0))
    free = wallet(world.customer.wallet_code).available
    factories.open_hold(world.customer, str(free + leased - amount), key="the rest")


async def test_what_other_gateways_have_leased_is_called_for_before_a_request_is_refused(
    gateways, world, monkeypatch
):
    """All that is left is in the lease of the first one; what no request of it needs is the second one's to give."""
    first, second = gateways
    await credit(world, "9")
    under_way = await lease_of(first, world)
    lease = await orm(lambda: Hold.objects.get(state="open", key__startswith="lease:"))
    await orm(
        lambda: factories.open_hold(
            world.customer, str(wallet(world.customer.wallet_code).available), key="the rest"
        )
    )
    unneeded = int((lease.amount.amount - MOST) / MOST)  # one request is under way in it
    assert unneeded > 5
    monkeypatch.setattr(leases, "RECALL_S", 60)  # nothing here is decided by a slow machine
    got = await asyncio.gather(*[admit(second, world) for _ in range(unneeded)])
    monkeypatch.setattr(leases, "RECALL_S", 0.1)
    with pytest.raises(Refusal) as caught:
        await admit(second, world)
    assert caught.value.status == 402
    assert (await purse(world)).available < MOST
    for gateway, tickets in ((first, under_way), (second, got)):
        for ticket in tickets:
            await gateway.settle(answer_for(ticket))
    await books_agree(world)


async def test_without_credit_anywhere_a_request_is_refused_at_once(gateways, world):
    first, _ = gateways
    await orm(lambda: _leave_free(world, MOST / 2))
    with pytest.raises(Refusal) as caught:
        await admit(first, world)
    assert caught.value.status == 402
    assert not await orm(LeaseCall.objects.exists)  # nobody was called


async def test_what_a_killed_gateway_had_leased_settles_and_expires(world):
    await credit(world, "99")
    killed = BrokerageAdmission()
    await killed.start()
    tickets = await lease_of(killed, world)
    lost, late = [ticket for ticket in [*tickets, await admit(killed, world)] if "rates" in ticket.record][:2]
    killed._leases._over.clear()
    killed._leases._wallets.clear()  # it can give back nothing any more
    await killed.stop()
    heir = BrokerageAdmission()
    await heir.start()
    try:
        await heir.settle(answer_for(lost, outcome=Outcome.RECOVERED))
        await charge_all()
        await books_agree(world)
        await orm(_all_holds_are_over)
        await orm(lambda: expire_due_holds(limit=1000))
        assert (await purse(world)).held == 0
        for _ in range(2):
            await heir.settle(answer_for(late, outcome=Outcome.RECOVERED))
        await charge_all()
        assert (await purse(world)).posted == 100 - 2 * COST
        await books_agree(world)
    finally:
        await heir.stop()


def _all_holds_are_over() -> None:
    with psycopg.connect(database_url(connection.settings_dict["NAME"], SUPERUSER)) as admin:
        admin.execute("UPDATE ledger_hold SET expires_at = clock_timestamp() WHERE state = 'open'")


async def test_a_budget_ends_leasing_within_a_second_and_knows_what_was_under_way(gateways, world):
    await credit(world, "99")
    first, _ = gateways
    tickets = await lease_of(first, world)
    budget = await orm(
        lambda: set_budget(
            customer=world.customer, period=Budget.Period.MONTHLY, amount=Decimal(50), actor=None
        )
    )

    async def by_itself() -> bool:
        tickets.append(await admit(first, world))
        return "rates" not in tickets[-1].record

    await eventually(by_itself)
    now = datetime.now(UTC)
    await asyncio.gather(
        *[first.settle(answer_for(ticket, started_at=now, finished_at=now)) for ticket in tickets]
    )
    await charge_all()
    standing = (await orm(lambda: budget_status(world.customer)))[budget.pk]
    assert standing.spent == len(tickets) * COST
    assert standing.held == 0


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_two_gateways_never_overspend(gateways, world, seed):
    """Random admissions, ends, charges and idle times; what was admitted always fits in what there was."""
    dice = random.Random(seed)
    await credit(world, "9")  # 500 requests' worth
    open_: list[tuple[BrokerageAdmission, Ticket]] = []
    charged = 0
    for _ in range(60):
        gateway = dice.choice(gateways)
        match dice.choices(["ask", "end", "abandon", "charge", "tidy"], [6, 4, 2, 1, 1])[0]:
            case "ask":
                asked = [admit(gateway, world) for _ in range(dice.randint(1, 40))]
                results = await asyncio.gather(*asked, return_exceptions=True)
                open_ += [(gateway, each) for each in results if isinstance(each, Ticket)]
                assert all(each.status == 402 for each in results if not isinstance(each, Ticket))
            case "end" | "abandon" as how if open_:
                dice.shuffle(open_)
                count = dice.randint(1, len(open_))
                ending, open_ = open_[:count], open_[count:]
                if how == "end":
                    await asyncio.gather(*[owner.settle(answer_for(ticket)) for owner, ticket in ending])
                    charged += count
                else:
                    await asyncio.gather(
                        *[owner.abandon(ticket.request_id, ticket.record) for owner, ticket in ending]
                    )
            case "charge":
                await charge_all()
            case "tidy":
                await gateway._leases.tidy(everything=dice.random() < 0.5)
        assert len(open_) * MOST + charged * COST <= 10
        await books_agree(world)
    await asyncio.gather(*[owner.settle(answer_for(ticket)) for owner, ticket in open_])
    await charge_all()
    for gateway in gateways:
        await gateway._leases.tidy(everything=True)
    now = await purse(world)
    assert (now.held, now.posted) == (0, 10 - (charged + len(open_)) * COST)
    assert [result.name for result in await orm(verify_books) if not result.ok] == []
