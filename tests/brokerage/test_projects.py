"""Projects: whose a key is, what a project may spend, and what is left of one that is archived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction

from brokerage.admission import BrokerageAdmission
from brokerage.models import APIKey, Budget, Project
from brokerage.services.budgets import budget_status, set_budget, set_time_zone
from brokerage.services.charging import charge_usage
from brokerage.services.keys import issue_key, revoke_key
from brokerage.services.projects import archive_project, create_project, default_project, rename_project
from kernel_steer.admission import Caller, Refusal
from tests.brokerage.broker import World, admit, answer_for, eventually, orm, refusal_of, world
from tests.brokerage.factories import audit_actions, in_threads, make_customer, make_key
from tests.brokerage.test_limits import patience

__all__ = ["patience", "world"]  # fixtures
CHARGED = Decimal("0.016")  # what `answer_for` costs


@pytest.fixture
async def gateways(world: World) -> AsyncIterator[list[BrokerageAdmission]]:
    brokers = [BrokerageAdmission(), BrokerageAdmission()]
    for broker in brokers:
        await broker.start()
    yield brokers
    for broker in brokers:
        await broker.stop()


def project(customer, name: str = "Bot") -> Project:
    return create_project(customer=customer, name=name, actor=None)


@pytest.mark.django_db
class TestWhoseKeysAre:
    def test_every_customer_has_a_default_project_and_keys_go_there(self):
        customer = make_customer()
        key, _ = make_key(customer)
        key.refresh_from_db()
        assert key.project == default_project(customer)
        # Also for rows that no service of ours has made.
        bare = APIKey(customer=customer, name="bare", key_hash=b"x" * 32, last4="xxxx")
        with pytest.raises(ValidationError):
            archive_project(project=default_project(customer), actor=None)
        APIKey.objects.bulk_create([bare])
        bare.refresh_from_db()
        assert bare.project == key.project

    def test_a_key_of_another_customers_project_is_refused_by_the_database(self):
        mine, theirs = make_customer(), make_customer(name="Other")
        with pytest.raises(ValidationError, match="no such project"):
            issue_key(customer=mine, project=project(theirs), name="k", actor=None)
        key = APIKey(
            customer=mine, project=default_project(theirs), name="k", key_hash=b"x" * 32, last4="xxxx"
        )
        with pytest.raises(IntegrityError, match="apikey_project_of_customer"), transaction.atomic():
            key.save()
            with connection.cursor() as cursor:
                cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def test_a_budget_of_another_customers_project_is_refused_by_both(self):
        mine, theirs = make_customer(), make_customer(name="Other")
        foreign = project(theirs)
        with pytest.raises(ValidationError, match="another customer"):
            set_budget(customer=mine, project=foreign, period="daily", amount=Decimal(1), actor=None)
        with pytest.raises(IntegrityError, match="budget_project_of_customer"), transaction.atomic():
            Budget.objects.create(customer=mine, project=foreign, period="daily", amount=1)

    def test_a_key_stays_in_its_project(self):
        customer = make_customer()
        key, _ = make_key(customer)
        with pytest.raises(IntegrityError, match="stays in its project"), transaction.atomic():
            APIKey.objects.filter(pk=key.pk).update(project=project(customer))
        revoke_key(key=key, actor=None)  # other columns change as ever


@pytest.mark.django_db
class TestNames:
    def test_one_name_once_whatever_its_case_until_it_is_archived(self):
        customer = make_customer()
        first = project(customer, "Bot")
        for taken in ("bot", " BOT ", "default"):
            with pytest.raises(ValidationError, match="of this name already"):
                project(customer, taken)
        project(make_customer(name="Other"), "Bot")
        archive_project(project=first, actor=None)
        second = project(customer, "Bot")
        with pytest.raises(ValidationError, match="keeps its name"):
            rename_project(project=Project.objects.get(pk=first.pk), name="Old bot", actor=None)
        assert rename_project(project=second, name="New bot", actor=None)
        assert not rename_project(project=second, name="New bot", actor=None)
        with pytest.raises(ValidationError, match="Give the project a name"):
            rename_project(project=second, name="  ", actor=None)

    def test_renaming_what_somebody_has_archived_meanwhile_does_not_bring_it_back(self):
        customer = make_customer()
        seen = project(customer)
        archive_project(project=Project.objects.get(pk=seen.pk), actor=None)
        rename_project(project=seen, name="Late", actor=None)
        assert Project.objects.get(pk=seen.pk).archived_at is not None


@pytest.mark.django_db
def test_archiving_revokes_keys_once_and_takes_no_new_ones():
    customer = make_customer()
    bot = project(customer)
    keys = [issue_key(customer=customer, project=bot, name=f"{n}", actor=None).key for n in range(3)]
    revoke_key(key=keys[0], actor=None)
    other, _ = make_key(customer)
    assert [archive_project(project=bot, actor=None) for _ in range(2)] == [2, 0]
    assert not bot.api_keys.filter(revoked_at__isnull=True).exists()
    other.refresh_from_db()
    assert other.revoked_at is None
    with pytest.raises(ValidationError, match="is archived"):
        issue_key(customer=customer, project=bot, name="late", actor=None)
    with pytest.raises(IntegrityError, match="is archived"), transaction.atomic():
        APIKey.objects.create(customer=customer, project=bot, name="late", key_hash=b"x" * 32, last4="xxxx")
    assert audit_actions().count("project.archived") == 1


def test_no_key_slips_in_while_a_project_is_archived(fresh_database):
    customer = make_customer()
    projects = [project(customer, f"{n}") for n in range(12)]

    def work(number: int) -> None:
        if number % 2:
            archive_project(project=projects[number // 2], actor=None)
            return
        with suppress(ValidationError):  # archived before
            issue_key(customer=customer, project=projects[number // 2], name="k", actor=None)

    in_threads(8, lambda worker: [work(number) for number in range(worker, 24, 8)])
    assert not APIKey.objects.filter(project__archived_at__isnull=False, revoked_at__isnull=True).exists()
    assert Project.objects.filter(archived_at__isnull=False).count() == 12


async def test_50_at_once_over_two_gateways_never_hold_more_than_a_projects_budget(patience, gateways, world):
    """Two keys share it; a third one, of another project, is not concerned."""

    def prepare() -> tuple[Budget, list[APIKey], APIKey]:
        bot = project(world.customer)
        mine = [
            issue_key(customer=world.customer, project=bot, name=f"{n}", actor=None).key for n in range(2)
        ]
        budget = set_budget(
            customer=world.customer, project=bot, period="monthly", amount=Decimal("0.20"), actor=None
        )
        return budget, mine, world.key

    budget, keys, outside = await orm(prepare)

    def asked(number: int, key: APIKey):
        caller = Caller(str(key.pk), str(world.customer.pk))
        return gateways[number % 2].admit(
            caller,
            request_id=str(uuid4()),
            model="gemma",
            prompt_tokens_max=100,
            completion_tokens_max=50,
        )

    attempts = [asked(number, keys[number % 3 % 2]) for number in range(50)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Refusal)]
    assert len(refused) == 40
    assert {(r.status, r.code) for r in refused} == {(429, "budget_exceeded")}
    assert "monthly budget of the project “Bot”" in refused[0].message
    await asked(0, outside)

    # What is charged counts, the rest comes back; a new count from the books says the same.
    tickets = [result for result in results if not isinstance(result, Refusal)]
    now = datetime.now(UTC)
    for ticket in tickets:
        await gateways[0].settle(answer_for(ticket, started_at=now, finished_at=now))
    while await orm(lambda: charge_usage(limit=100)):
        pass

    def standing() -> tuple[Decimal, Decimal]:
        found = budget_status(world.customer)[budget.pk]
        return found.spent, found.held

    assert await orm(standing) == (10 * CHARGED, 0)
    await orm(lambda: set_time_zone(customer=world.customer, time_zone="Asia/Kolkata", actor=None))
    assert await orm(standing) == (10 * CHARGED, 0)


async def test_a_projects_window_is_the_customers_own_midnight(gateways, world):
    def prepare() -> Budget:
        set_time_zone(customer=world.customer, time_zone="America/Havana", actor=None)
        home = default_project(world.customer)
        return set_budget(
            customer=world.customer, project=home, period="daily", amount=Decimal("0.01"), actor=None
        )

    budget = await orm(prepare)
    refusal = await refusal_of(admit(gateways[0], world))
    assert "daily budget of the project “Default”" in refusal.message
    end = (await orm(lambda: budget_status(world.customer)))[budget.pk].window_end
    # Where the clocks change at midnight, the day begins at one.
    assert end.astimezone(ZoneInfo("America/Havana")).hour in (0, 1)


async def test_keys_of_an_archived_project_are_strangers_within_a_second(gateways, world):
    def prepare() -> tuple[Project, str]:
        bot = project(world.customer)
        return bot, issue_key(customer=world.customer, project=bot, name="k", actor=None).plaintext

    bot, secret = await orm(prepare)
    await gateways[0].authenticate(f"Bearer {secret}")
    await orm(lambda: archive_project(project=bot, actor=None))

    async def refused() -> bool:
        try:
            await gateways[0].authenticate(f"Bearer {secret}")
        except Refusal as refusal:
            return refusal.status == 401
        return False

    assert await eventually(refused, timeout_s=30)
    await gateways[0].authenticate(world.bearer)
