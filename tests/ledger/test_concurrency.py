"""Many at once on the same money."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connections
from djmoney.money import Money

from ledger.errors import InsufficientFunds
from ledger.models import Account
from ledger.selectors import account_balance, wallet
from ledger.services import (
    JournalRequest,
    create_hold,
    expire_due_holds,
    platform_account,
    post_journal,
    post_journals,
    void_hold,
)
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet, spend

THREADS = 20


@pytest.fixture
def revenue(fresh_database) -> Account:
    return platform_account(code="usage_revenue", currency="USD")


def at_once(work: Callable[[int], object], times: int) -> list[object]:
    """Runs it with connections of their own; gives results, and refusals as their classes."""

    def run(number: int) -> object:
        try:
            return work(number)
        except InsufficientFunds as refusal:
            return type(refusal)
        finally:
            connections["default"].close()

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(times)))


def one(team: Account, revenue: Account, key: str) -> object:
    return post_journal(
        scope="test", key=key, kind="usage", currency="USD", lines=spend(team, revenue, "1"), actor="test"
    ).journal_id


def broken() -> list[str]:
    return [result.name for result in verify_books() if not result.ok]


def test_of_a_hundred_spends_of_one_on_fifty_exactly_fifty_succeed(revenue):
    team = make_wallet("50")
    results = at_once(lambda n: one(team, revenue, f"spend {n}"), 100)
    assert Counter(isinstance(result, int) for result in results) == {True: 50, False: 50}
    assert results.count(InsufficientFunds) == 50
    assert (wallet(team.code).posted, account_balance(revenue), broken()) == (0, 50, [])


def test_of_a_hundred_holds_of_one_on_fifty_exactly_fifty_succeed(revenue):
    team = make_wallet("50")

    def hold(number: int) -> object:
        return create_hold(
            account=team, amount=Money(1, "USD"), key=f"h{number}", ttl=timedelta(minutes=1), actor="test"
        ).hold_id

    results = at_once(hold, 100)
    assert results.count(InsufficientFunds) == 50
    assert (wallet(team.code).available, broken()) == (0, [])


def test_the_same_key_at_once_books_once(revenue):
    team = make_wallet("50")
    results = at_once(lambda n: one(team, revenue, "same"), 40)
    assert len(set(results)) == 1
    assert (wallet(team.code).posted, broken()) == (49, [])


def test_the_same_account_opened_at_once_is_one_account(revenue):
    ids = at_once(lambda n: platform_account(code="tax", currency="USD").pk, 40)
    assert len(set(ids)) == 1


def test_singles_batches_holds_and_expiry_do_not_block_each_other(revenue):
    """A wrong order of locks ends in PostgreSQL's deadlock error here."""
    teams = [make_wallet("1000") for _ in range(4)]

    def work(number: int) -> None:
        for turn in range(6):
            team = teams[(number + turn) % 4]
            held = create_hold(
                account=team, amount=Money(1, "USD"), key=uuid.uuid4().hex, actor="test",
                ttl=timedelta(minutes=1) if turn % 2 else timedelta(microseconds=1),
            ).hold_id  # fmt: skip
            order = teams if number % 2 else teams[::-1]
            keys = [f"{number} {turn} {index}" for index in range(4)]
            batch = [
                JournalRequest("test", key, "usage", "USD", spend(other, revenue, "1"), "test",
                               capture_hold=held if other == team and turn % 3 else None)
                for other, key in zip(order, keys, strict=True)
            ]  # fmt: skip
            post_journals(batch)
            one(team, revenue, uuid.uuid4().hex)
            if number % 2:
                expire_due_holds(limit=50)
            void_hold(hold_id=held)

    at_once(work, THREADS)
    spent = sum(1000 - wallet(team.code).posted for team in teams)
    assert spent == account_balance(revenue) == THREADS * 6 * 5
    assert broken() == []
