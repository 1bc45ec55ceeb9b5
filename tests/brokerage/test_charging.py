"""From usage to money: once, whoever dies."""

import io
import json
import os
import signal
import subprocess
import sys
from decimal import Decimal

import pytest
from django.core.management import call_command

from brokerage import tasks
from brokerage.models import UsageEvent
from brokerage.services.charging import charge_usage
from ledger.models import Entry, Hold, Journal, UsageLine
from ledger.selectors import wallet
from ledger.services import void_hold
from tests.brokerage.factories import (
    give_credit,
    in_threads,
    make_customer,
    make_model,
    make_price,
    make_usage,
    open_hold,
)
from tests.services import database_url


@pytest.fixture
def price():
    return make_price(make_model(), prompt="0.0001", completion="0.0002")


def charged() -> int:
    return UsageEvent.objects.filter(charged_at__isnull=False).count()


def assert_books_in_order() -> None:
    out = io.StringIO()
    call_command("ledger_verify", "--json", stdout=out)
    report = json.loads(out.getvalue())
    assert report["ok"], [check for check in report["checks"] if not check["ok"]]


@pytest.mark.django_db
def test_it_works(price):
    customer = make_customer(credit="1")
    usage = make_usage(customer, price, prompt_tokens=100, completion_tokens=50)
    usage.hold_id = open_hold(customer, "0.5", key=str(usage.pk))
    usage.save()
    assert charge_usage(limit=10) == 1
    usage.refresh_from_db()
    assert (usage.amount, usage.charged_at is not None) == (Decimal("0.02"), True)
    journal = Journal.objects.get(pk=usage.journal_id)
    assert (journal.idem_scope, journal.kind) == ("usage.tick", "usage")
    assert journal.meta == {"lines": 1, "quantity": 150, "sku": usage.served_model.name}
    line = UsageLine.objects.get(journal=journal)
    assert (line.event_id, line.amount.amount) == (f"answer:{usage.pk}", Decimal("0.02"))
    purse = wallet(customer.wallet_code)
    assert (purse.posted, purse.held, purse.available) == (Decimal("0.98"), 0, Decimal("0.98"))
    assert Hold.objects.get(pk=usage.hold_id).state == "captured"
    assert usage.api_key.last_used_at == usage.finished_at


@pytest.mark.django_db
def test_the_price_at_admission_counts_not_the_one_of_today(price):
    customer = make_customer(credit="1")
    usage = make_usage(customer, price, prompt_tokens=100, completion_tokens=50)
    make_price(make_model(), prompt="1", completion="1")
    charge_usage(limit=10)
    usage.refresh_from_db()
    assert usage.amount == Decimal("0.02")


@pytest.mark.django_db
def test_nothing_delivered_costs_nothing_and_releases_the_hold(price):
    customer = make_customer(credit="1")
    usage = make_usage(customer, price, prompt_tokens=100, completion_tokens=0, outcome="failed")
    usage.hold_id = open_hold(customer, "0.5", key=str(usage.pk))
    usage.save()
    assert charge_usage(limit=10) == 1
    usage.refresh_from_db()
    assert (usage.amount, usage.journal_id) == (0, None)
    assert wallet(customer.wallet_code).available == 1
    assert Hold.objects.get(pk=usage.hold_id).state == "voided"
    assert not Journal.objects.filter(kind="usage").exists()


@pytest.mark.django_db
def test_a_free_model_is_charged_nothing():
    customer = make_customer()
    usage = make_usage(customer, make_price(make_model(), prompt="0", completion="0"))
    assert charge_usage(limit=10) == 1
    usage.refresh_from_db()
    assert (usage.amount, usage.journal_id) == (0, None)


@pytest.mark.django_db
def test_the_answers_of_a_wallet_share_a_journal(price, django_assert_max_num_queries):
    busy, other = make_customer(credit="1"), make_customer(credit="1", name="Other")
    usages = [make_usage(busy, price) for _ in range(12)] + [make_usage(other, price)]
    for usage in usages:
        usage.hold_id = open_hold(usage.customer, "0.05", key=str(usage.pk))
        usage.save()
    with django_assert_max_num_queries(20):
        assert charge_usage(limit=100) == 13
    journals = {usage.journal_id for usage in UsageEvent.objects.filter(customer=busy)}
    assert len(journals) == 1
    journal = Journal.objects.get(pk=journals.pop())
    assert (journal.meta["lines"], journal.holds.count(), journal.entries.count()) == (12, 12, 2)
    purse = wallet(busy.wallet_code)
    assert (purse.posted, purse.held) == (Decimal("0.76"), 0)
    assert wallet(other.wallet_code).posted == Decimal("0.98")
    assert_books_in_order()


@pytest.mark.django_db
def test_again_charges_nothing(price):
    customer = make_customer(credit="1")
    make_usage(customer, price)
    assert [charge_usage(limit=10) for _ in range(2)] == [1, 0]
    assert wallet(customer.wallet_code).posted == Decimal("0.98")


@pytest.mark.django_db
def test_the_task_charges_all_there_is(price, monkeypatch):
    monkeypatch.setattr(tasks, "CHARGE_BATCH", 3)
    customer = make_customer(credit="1")
    for _ in range(7):
        make_usage(customer, price)
    tasks.charge_usage()
    assert charged() == 7


def test_many_workers_charge_each_answer_once(fresh_database):
    price = make_price(make_model(), prompt="0.0001", completion="0.0002")
    customers = [make_customer(credit="1", name=f"Customer {number}") for number in range(3)]
    for number in range(45):
        customer = customers[number % 3]
        tokens = 0 if number % 5 == 0 else 50
        usage = make_usage(customer, price, completion_tokens=tokens)
        UsageEvent.objects.filter(pk=usage.pk).update(hold_id=open_hold(customer, "0.02", key=str(usage.pk)))

    def work(_: int) -> int:
        return sum(iter(lambda: charge_usage(limit=4), 0))

    assert sum(in_threads(6, work)) == 45
    assert charged() == 45
    assert UsageLine.objects.filter(journal__kind="usage").count() == 36
    # 12 paid answers each, of 100 x 0.0001 + 50 x 0.0002
    assert [wallet(customer.wallet_code).posted for customer in customers] == [Decimal("0.76")] * 3
    assert not Hold.objects.filter(state="open").exists()
    assert_books_in_order()


# Runs charge_usage in a process that kills itself with -9 at a given moment, at the latest after it.
_VICTIM = """
import os, signal
import django
django.setup()
from brokerage.services import charging
from django.db import connection

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

{sabotage}
charging.charge_usage(limit=10)
die()
"""


def run_victim(database: str, sabotage: str) -> None:
    victim = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _VICTIM.format(sabotage=sabotage)],
        env=os.environ | {"DATABASE_URL": database_url(database)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert victim.returncode == -signal.SIGKILL, victim.stderr


_SABOTAGE = {
    "after the claim": "charging._bill = die",
    "before posting": "charging.charge_lines = die",
    "after posting": "charging._mark = die",
    "before the commit": "connection._commit = die",
}


@pytest.mark.parametrize("moment", _SABOTAGE)
def test_a_worker_killed_at_any_moment_leaves_everything_to_the_next(fresh_database, moment):
    price = make_price(make_model(), prompt="0.0001", completion="0.0002")
    customer = make_customer(credit="1")
    usages = [make_usage(customer, price) for _ in range(5)]
    for usage in usages:
        UsageEvent.objects.filter(pk=usage.pk).update(hold_id=open_hold(customer, "0.1", key=str(usage.pk)))
    run_victim(fresh_database, _SABOTAGE[moment])
    assert (charged(), UsageLine.objects.count(), Journal.objects.filter(kind="usage").count()) == (0, 0, 0)
    assert charge_usage(limit=10) == 5
    assert wallet(customer.wallet_code).posted == Decimal("0.90")
    assert_books_in_order()


def test_a_worker_killed_after_its_commit_is_not_repeated(fresh_database):
    price = make_price(make_model(), prompt="0.0001", completion="0.0002")
    customer = make_customer(credit="1")
    make_usage(customer, price)
    run_victim(fresh_database, "")
    assert charge_usage(limit=10) == 0
    assert wallet(customer.wallet_code).posted == Decimal("0.98")
    assert_books_in_order()


@pytest.mark.django_db
def test_a_hold_that_ran_out_does_not_stop_the_charge(price):
    """The answer was delivered; what the wallet cannot pay any more is the customer's debt."""
    customer = make_customer(credit="0.02")
    usage = make_usage(customer, price)
    UsageEvent.objects.filter(pk=usage.pk).update(hold_id=open_hold(customer, "0.02", key=str(usage.pk)))
    void_hold(hold_id=UsageEvent.objects.get().hold_id)
    open_hold(customer, "0.02", key="another request has taken the credit meanwhile")
    assert charge_usage(limit=10) == 1
    assert Entry.objects.get(account__code__startswith="customer_receivable").amount.amount == Decimal(
        "-0.02"
    )


@pytest.mark.django_db
def test_what_the_books_refuse_holds_nobody_up(price, caplog):
    """Usage without a hold on an empty wallet: the gateway never writes that, somebody did."""
    poor, rich = make_customer(name="Poor"), make_customer(credit="1", name="Rich")
    refused = make_usage(poor, price)
    fine = [make_usage(rich, price) for _ in range(3)]
    assert charge_usage(limit=10) == 3
    assert set(UsageEvent.objects.filter(charged_at__isnull=False)) == set(fine)
    assert str(refused.pk) in caplog.text
    give_credit(poor, "1")
    assert charge_usage(limit=10) == 1
