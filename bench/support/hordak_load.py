"""django-hordak under the same loads as our ledger, run by an environment of its own that has it.

    python hordak_load.py DATABASE HOST USER prepare
    python hordak_load.py DATABASE HOST USER single|hot|batch100 SECONDS CLIENTS

Prints {"per_s", "p99_ms"}. Singles go through `Account.transfer_to`, batches through its models' bulk_create,
which is the fastest way it has.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

import django
from django.conf import settings

ACCOUNTS, BATCH = 1000, 100
gate: Any = None


def configure(name: str, host: str, user: str) -> None:
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": name, "HOST": host, "USER": user}
    settings.configure(
        DATABASES={"default": {**database, "CONN_MAX_AGE": None}},
        INSTALLED_APPS=["django.contrib.contenttypes", "mptt", "hordak"],
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        USE_TZ=True,
        DEFAULT_CURRENCY="USD",
        HORDAK_INTERNAL_CURRENCY="USD",
        HORDAK_CURRENCIES=["USD"],
        CURRENCIES=["USD"],
        HORDAK_DECIMAL_PLACES=9,
        HORDAK_MAX_DIGITS=24,
    )
    django.setup()


def prepare() -> None:
    from django.core.management import call_command
    from hordak.models import Account

    call_command("migrate", verbosity=0)
    with Account.objects.disable_mptt_updates():
        for number in range(ACCOUNTS + 1):
            Account.objects.create(
                name=f"account {number}", code=str(number), type="IN", currencies=["USD"],
                lft=0, rght=0, tree_id=number, level=0,
            )  # fmt: skip


def run(phase: str, seconds: float, clients: int) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    with context.Pool(clients, enter, [context.Barrier(clients)]) as pool:
        by_client = pool.starmap(client, [(phase, seconds, number) for number in range(clients)], chunksize=1)
    weight = BATCH if phase == "batch100" else 1
    calls = sorted(took for client_calls in by_client for took in client_calls)
    return {
        "per_s": round(sum(len(own) * weight / (sum(own) / 1e9) for own in by_client), 1),
        "p99_ms": round(calls[-(-99 * len(calls) // 100) - 1] / 1e6, 2),
    }


def enter(barrier) -> None:
    global gate
    gate = barrier


def client(phase: str, seconds: float, number: int) -> list[int]:
    from hordak.models import Account

    accounts = list(Account.objects.order_by("id"))
    call = {"single": single, "hot": hot, "batch100": batch100}[phase](accounts, number)
    gate.wait(60)
    took: list[int] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter_ns()
        call(len(took))
        took.append(time.perf_counter_ns() - began)
    return took


def pick(accounts: list, client_number: int, number: int):
    return accounts[(number * 7919 + client_number * 131) % ACCOUNTS]


def amount():
    from moneyed import Money

    return Money("0.000012345", "USD")


def single(accounts: list, own: int) -> Callable[[int], None]:
    from django.db import transaction

    def call(number: int) -> None:
        with transaction.atomic():
            pick(accounts, own, number).transfer_to(pick(accounts, own, number + 500), amount())

    return call


def hot(accounts: list, own: int) -> Callable[[int], None]:
    from django.db import transaction

    def call(number: int) -> None:
        with transaction.atomic():
            pick(accounts, own, number).transfer_to(accounts[-1], amount())

    return call


def batch100(accounts: list, own: int) -> Callable[[int], None]:
    from django.db import transaction
    from hordak.models import Leg, Transaction

    def call(number: int) -> None:
        with transaction.atomic():
            made = Transaction.objects.bulk_create([Transaction() for _ in range(BATCH)])
            legs = []
            for index, one in enumerate(made, number * BATCH):
                legs.append(Leg(transaction=one, account=pick(accounts, own, index), credit=amount()))
                legs.append(Leg(transaction=one, account=accounts[-1], debit=amount()))
            Leg.objects.bulk_create(legs)

    return call


if __name__ == "__main__":
    database, host, user, what, *numbers = sys.argv[1:]
    configure(database, host, user)
    if what == "prepare":
        prepare()
    else:
        print(json.dumps(run(what, float(numbers[0]), int(numbers[1]))))
