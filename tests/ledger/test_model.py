"""Random work on the books, against a model of some fifty lines."""

from __future__ import annotations

import math
import time
import uuid
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from djmoney.money import Money
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger.errors import HoldNotOpen, InsufficientFunds, OverCapture
from ledger.models import CreditGrant
from ledger.selectors import entries_page, wallet
from ledger.services import JournalRequest as Request
from ledger.services import (
    Line,
    capture_hold,
    create_hold,
    exchange,
    expire_due_grants,
    grant_credit,
    platform_account,
    post_journal,
    post_journals,
    reverse_journal,
    void_hold,
)
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet

amounts = st.integers(1, 20_000_000_000).map(lambda nano: Decimal(nano).scaleb(-9))
on_wallet = ("credit", "spend", "batch", "move", "hold", "promotion", "amends", "promise", "exchange")
operations = st.one_of(
    st.tuples(st.sampled_from(on_wallet), st.integers(0, 1), amounts),
    st.tuples(st.sampled_from(("void", "capture", "capture", "undo")), st.integers(0, 5), amounts),
    st.tuples(st.just("sweep"), st.just(0), amounts),
)


class Model:
    """Two wallets as plain numbers. Grants are [remaining, order of draws, the step in which it expired]."""

    def __init__(self) -> None:
        self.posted = [Decimal(0), Decimal(0)]
        self.grants: list[list[list]] = [[], []]
        self.holds: list[list] = []  # wallet, amount, open, step
        self.spends: list[tuple] = []  # wallet, amount, draws; emptied by the reversal
        self.step = 0

    def held(self, wallet: int) -> Decimal:
        return sum((amount for w, amount, is_open, _ in self.holds if w == wallet and is_open), Decimal(0))

    def over(self, wallet: int, step: float) -> Decimal:
        return sum((grant[0] for grant in self.grants[wallet] if grant[2] < step), Decimal(0))

    def granted(self, wallet: int) -> Decimal:
        return sum((grant[0] for grant in self.grants[wallet]), Decimal(0))

    def available(self, wallet: int) -> Decimal:
        return max(Decimal(0), self.posted[wallet] - self.held(wallet) - self.over(wallet, math.inf))

    def take(self, wallet: int, amount: Decimal, step: float = math.inf) -> None:
        """Spends it, drawing on the grants that were good in that step."""
        self.posted[wallet] -= amount
        draws, rest = [], amount
        for grant in sorted((g for g in self.grants[wallet] if g[2] >= step), key=lambda g: g[1]):
            draws.append((grant, min(rest, grant[0])))
            grant[0] -= draws[-1][1]
            rest -= draws[-1][1]
        self.spends.append((wallet, amount, draws))

    def apply(self, what: str, which: int, amount: Decimal) -> type[Exception] | None:
        """Changes the model, or tells how the ledger must refuse."""
        self.step += 1
        if what == "credit":
            self.posted[which] += amount
        elif what in {"promotion", "amends", "promise"}:  # a promise is over before the next step
            self.posted[which] += amount
            expired = self.step if what == "promise" else math.inf
            self.grants[which].append([amount, (what == "amends", expired, self.step), expired])
        elif what == "exchange":
            paid = self.posted[which] - self.granted(which)
            if min(paid, self.posted[which] - self.held(which)) < amount:
                return InsufficientFunds
            self.posted[which] -= amount
        elif what in {"spend", "batch", "move", "hold"}:
            if self.available(which) < amount:
                return InsufficientFunds
            if what == "hold":
                self.holds.append([which, amount, True, self.step])
            else:
                self.take(which, amount)
            if what == "move":
                self.posted[1 - which] += amount
                self.spends.pop()
        elif what == "sweep":
            for index, grants in enumerate(self.grants):
                rest = self.over(index, math.inf) - self.held(index)
                for grant in sorted((g for g in grants if g[2] < math.inf), key=lambda g: g[1], reverse=True):
                    taken = max(Decimal(0), min(rest, grant[0]))
                    grant[0] -= taken
                    self.posted[index] -= taken
                    rest -= taken
        elif what == "undo":
            owner, paid, draws = self.spends[which]
            self.spends[which] = (owner, Decimal(0), [])
            self.posted[owner] += paid
            for grant, drawn in draws:
                grant[0] += drawn
        else:
            owner, held, is_open, step = self.holds[which]
            if what == "capture":
                if not is_open:
                    return HoldNotOpen
                if amount > held:
                    return OverCapture
                self.holds[which][2] = False
                self.take(owner, amount, step)
            self.holds[which][2] = False
        return None


class Books:
    """The same operations on the real ledger."""

    def __init__(self) -> None:
        self.teams = [make_wallet(), make_wallet()]
        self._euros = make_wallet(currency="EUR")
        self._bank, self._revenue = (
            platform_account(code=code, currency="USD").pk for code in ("bank", "usage_revenue")
        )
        self._holds: list[tuple[int, int]] = []  # hold, account
        self._spends: list[int] = []

    def apply(self, what: str, which: int, amount: Decimal) -> None:
        if what == "sweep":
            expire_due_grants(limit=10)
        elif what == "undo":
            reverse_journal(journal_id=self._spends[which], reason="test", actor="test")
        elif what == "void":
            void_hold(hold_id=self._holds[which][0])
        elif what == "capture":
            hold, account = self._holds[which]
            posted = capture_hold(hold_id=hold, **self._journal(account, self._revenue, amount))
            self._spends.append(posted.journal_id)
        elif what == "hold":
            placed = create_hold(
                account=self.teams[which],
                amount=Money(amount, "USD"),
                key=uuid.uuid4().hex,
                ttl=timedelta(hours=1),
                actor="test",
            )
            self._holds.append((placed.hold_id, self.teams[which].pk))
        elif what in {"promotion", "amends", "promise"}:
            self._grant(what, which, amount)
        elif what == "exchange":
            exchange(
                key=uuid.uuid4().hex, source=self.teams[which], sold=Money(amount, "USD"), target=self._euros,
                bought=Money(amount, "EUR"), actor="test",
            )  # fmt: skip
        else:
            self._post(what, which, amount)

    def _post(self, what: str, which: int, amount: Decimal) -> None:
        account, other = self.teams[which].pk, self.teams[1 - which].pk
        source, target = {"credit": (self._bank, account), "move": (account, other)}.get(
            what, (account, self._revenue)
        )
        journal = self._journal(source, target, amount)
        if what == "batch":
            (posted,) = post_journals([Request(**journal)])
        else:
            posted = post_journal(**journal)
        if what in {"spend", "batch"}:
            self._spends.append(posted.journal_id)

    def _grant(self, what: str, which: int, amount: Decimal) -> None:
        over = database_clock() + timedelta(milliseconds=60) if what == "promise" else None
        grant_credit(
            account=self.teams[which],
            kind=CreditGrant.Kind.SLA if what == "amends" else CreditGrant.Kind.PROMOTIONAL,
            amount=Money(amount, "USD"),
            key=uuid.uuid4().hex,
            actor="test",
            expires_at=over,
        )
        deadline = time.monotonic() + 20
        while over is not None and database_clock() <= over:
            assert time.monotonic() < deadline

    def _journal(self, source: int, target: int, amount: Decimal) -> dict[str, Any]:
        return {
            "scope": "model",
            "key": uuid.uuid4().hex,
            "kind": "test",
            "currency": "USD",
            "lines": [Line(source, -amount), Line(target, amount)],
            "actor": "test",
        }


def database_clock() -> Any:
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        return cursor.fetchone()[0]


@pytest.mark.django_db
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=st.lists(operations, max_size=25))
def test_the_books_do_what_the_model_does(work):
    books, model = Books(), Model()
    for what, which, amount in work:
        if (what in {"void", "capture"} and which >= len(model.holds)) or (
            what == "undo" and which >= len(model.spends)
        ):
            continue
        refusal = model.apply(what, which, amount)
        if refusal is None:
            books.apply(what, which, amount)
        else:
            with pytest.raises(refusal):
                books.apply(what, which, amount)
        for index, team in enumerate(books.teams):
            now = wallet(team.code)
            assert (now.posted, now.held) == (model.posted[index], model.held(index))
            assert (now.granted, now.available) == (model.granted(index), model.available(index))
    for index, team in enumerate(books.teams):
        page = entries_page(account_id=team.pk)
        assert (page.entries[0].balance if page.entries else 0) == model.posted[index]
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
    assert [result for result in verify_books() if not result.ok] == []
