"""Answers charged per second: from stored usage to lines, journals, captured holds and marks, by several workers.

Prints one JSON object. A PostgreSQL of the bench's own that syncs to the disk; each round stores `--answers` answers of
`--wallets` wallets, each with a hold of its own, and `--workers` processes charge them in batches until none is left.
`answers_per_s` is the median of the rounds, `journals` what a round's answers were netted into, from first to last round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ledger import own_server

_ROOT = Path(__file__).resolve().parents[1]
_HELD, _CREDIT = Decimal("0.01"), Decimal(1000)


def _set_up(wallets: int) -> None:
    """Customers with credit and a key, and one model with a price."""
    from brokerage.models import Customer, ServedModel
    from brokerage.services.catalogue import set_price
    from brokerage.services.keys import issue_key
    from ledger.services import Line, open_wallet, platform_account, post_journal

    model = ServedModel.objects.create(name="bench", context_tokens=2048)
    set_price(served_model=model, prompt_rate=Decimal("2e-7"), completion_rate=Decimal("6e-7"), actor="bench")
    bank = platform_account(code="bank", currency="USD").pk
    for number in range(wallets):
        customer = Customer.objects.create(name=f"Customer {number}", currency="USD")
        issue_key(customer=customer, name="bench", actor=None)
        purse = open_wallet(code=customer.wallet_code, owner=str(customer.pk), currency="USD")
        post_journal(
            scope="bench", key=str(customer.pk), kind="credit", currency="USD", actor="bench",
            lines=[Line(purse.pk, _CREDIT), Line(bank, -_CREDIT)],
        )  # fmt: skip


def _store(answers: int) -> None:
    """As gateways store them, a hold for each."""
    from django.db import connection, transaction

    from brokerage.models import APIKey, ModelPrice, UsageEvent
    from ledger.models import Account

    price = ModelPrice.objects.select_related("served_model").get()
    purses = dict(Account.objects.filter(code__startswith="customer_credit:").values_list("owner", "pk"))
    keys = list(APIKey.objects.all())
    now, rows = datetime.now(UTC), []
    with transaction.atomic(), connection.cursor() as cursor:
        for number in range(answers):
            key, request = keys[number % len(keys)], uuid.uuid4()
            cursor.execute(
                "SELECT hold_id FROM hold_create(%s, %s, 'USD', %s, %s, 'bench')",
                [purses[str(key.customer_id)], _HELD, str(request), timedelta(minutes=15)],
            )
            rows.append(
                UsageEvent(
                    request_id=request, customer_id=key.customer_id, api_key=key, price=price,
                    served_model=price.served_model, hold_id=cursor.fetchone()[0], outcome="completed",
                    prompt_tokens=200, completion_tokens=100, started_at=now, finished_at=now, currency="USD",
                )
            )  # fmt: skip
        UsageEvent.objects.bulk_create(rows, batch_size=1000)


def _work(ready: multiprocessing.synchronize.Barrier) -> None:
    import django

    django.setup()
    from brokerage.services.charging import charge_usage
    from brokerage.tasks import CHARGE_BATCH

    charge_usage(limit=0)  # connected and imported before the clock starts
    ready.wait(60)
    # Less than a batch may mean that others had claimed the rest.
    while charge_usage(limit=CHARGE_BATCH):
        pass


def _round(answers: int, workers: int) -> tuple[float, int]:
    from django.db import connections

    from brokerage.models import UsageEvent

    _store(answers)
    connections.close_all()
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(workers + 1)
    processes = [context.Process(target=_work, args=(ready,)) for _ in range(workers)]
    for process in processes:
        process.start()
    ready.wait(60)
    began = time.perf_counter()
    for process in processes:
        process.join()
    took = time.perf_counter() - began
    charged = UsageEvent.objects.filter(charged_at__isnull=False)
    assert not UsageEvent.objects.filter(charged_at__isnull=True).exists(), "answers were left uncharged"
    latest = charged.order_by("-created_at").values_list("journal_id", flat=True)[:answers]
    return answers / took, len(set(latest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--wallets", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with own_server():
        owner = {**os.environ, "APEX_DB_ROLE": "owner"}
        subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], cwd=_ROOT, env=owner, check=True)
        import django

        django.setup()
        from ledger.verify import verify_books

        _set_up(given.wallets)
        rounds = [_round(given.answers, given.workers) for _ in range(given.rounds)]
        wrong = [result.name for result in verify_books() if not result.ok]
        assert wrong == [], f"the books do not hold: {wrong}"
    answer = {
        "bench": "charging", "answers": given.answers, "wallets": given.wallets, "workers": given.workers,
        "answers_per_s": round(statistics.median(per_s for per_s, _ in rounds)),
        "journals": [journals for _, journals in rounds],
    }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
