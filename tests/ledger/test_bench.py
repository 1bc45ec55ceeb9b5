"""The benchmark measures what it says, and leaves nothing behind."""

from __future__ import annotations

import json
from io import StringIO

import psycopg
import pytest
from django.core.management import CommandError, call_command

from apex.local.postgres import SUPERUSER
from ledger.bench import Bench, throw_away_database
from ledger.bench.load import _p99
from tests.services import database_url


def databases() -> list[str]:
    with psycopg.connect(database_url("postgres", SUPERUSER)) as admin:
        return sorted(
            name
            for (name,) in admin.execute("SELECT datname FROM pg_database WHERE datname LIKE 'apex_bench%'")
        )


def test_it_gives_every_figure_and_drops_its_database(fresh_database):
    out = StringIO()
    call_command("ledger_bench", "--json", "--seconds", "0.5", "--clients", "2", stdout=out)
    answer = json.loads(out.getvalue())
    for load in ("single", "hot", "hot_wallet", "batch100"):
        assert answer[load]["tps"] > 0
        assert answer[load]["p99_ms"] > 0
    assert answer["usage_lines_per_s"] > 0
    assert (answer["clients"], answer["seconds"]) == (2, 0.5)
    assert databases() == []


def test_a_posting_that_is_not_in_the_books_is_noticed(fresh_database):
    with throw_away_database() as url, Bench(url, 1) as bench:
        bench.run("single", 0.2)
        bench.check()
        bench._booked["single"] += 1
        with pytest.raises(AssertionError, match="were confirmed"):
            bench.check()


def test_the_database_is_dropped_when_the_bench_fails(fresh_database):
    with pytest.raises(ZeroDivisionError), throw_away_database():
        assert len(databases()) == 1
        raise ZeroDivisionError
    assert databases() == []


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--clients", "0"], ["--clients", "65"]])
def test_nonsense_is_refused(arguments):
    with pytest.raises(CommandError, match="must be above 0"):
        call_command("ledger_bench", *arguments)


def test_the_percentile_is_the_nearest_rank():
    assert _p99(list(range(1, 101))) == 99
    assert _p99([5]) == 5
    assert _p99([]) == 0
