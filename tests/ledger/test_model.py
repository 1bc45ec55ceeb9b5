"""Random work on the books, against a model of thirty lines."""

from __future__ import annotations

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
from ledger.selectors import entries_page, wallet
from ledger.services import Line, capture_hold, create_hold, platform_account, post_journal, void_hold
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet

amounts = st.integers(1, 20_000_000_000).map(lambda nano: Decimal(nano).scaleb(-9))
wallets = st.integers(0, 1)
operations = st.one_of(
    st.tuples(st.just("credit"), wallets, amounts),
    st.tuples(st.just("spend"), wallets, amounts),
    st.tuples(st.just("move"), wallets, amounts),
    st.tuples(st.just("hold"), wallets, amounts),
    st.tuples(st.just("void"), st.integers(0, 5), amounts),
    st.tuples(st.just("capture"), st.integers(0, 5), amounts),
)


class Model:
    """Two wallets as plain numbers."""

    def __init__(self) -> None:
        self.posted = [Decimal(0), Decimal(0)]
        self.holds: list[list] = []  # wallet, amount, open

    def held(self, wallet: int) -> Decimal:
        return sum((amount for w, amount, is_open in self.holds if w == wallet and is_open), Decimal(0))

    def apply(self, what: str, which: int, amount: Decimal) -> type[Exception] | None:
        """Changes the model, or tells how the ledger must refuse."""
        if what == "credit":
            self.posted[which] += amount
        elif what in {"spend", "move", "hold"}:
            if self.posted[which] - self.held(which) < amount:
                return InsufficientFunds
            if what == "hold":
                self.holds.append([which, amount, True])
            else:
                self.posted[which] -= amount
            if what == "move":
                self.posted[1 - which] += amount
        else:
            owner, held, is_open = self.holds[which]
            if what == "capture":
                if not is_open:
                    return HoldNotOpen
                if amount > held:
                    return OverCapture
                self.posted[owner] -= amount
            self.holds[which][2] = False
        return None


class Books:
    """The same operations on the real ledger."""

    def __init__(self) -> None:
        self.teams = [make_wallet(), make_wallet()]
        self._bank, self._revenue = (
            platform_account(code=code, currency="USD").pk for code in ("bank", "usage_revenue")
        )
        self._holds: list[tuple[int, int]] = []  # hold, account

    def apply(self, what: str, which: int, amount: Decimal) -> None:
        if what == "void":
            void_hold(hold_id=self._holds[which][0])
        elif what == "capture":
            hold, account = self._holds[which]
            capture_hold(hold_id=hold, **self._journal(account, self._revenue, amount))
        elif what == "hold":
            placed = create_hold(
                account=self.teams[which],
                amount=Money(amount, "USD"),
                key=uuid.uuid4().hex,
                ttl=timedelta(hours=1),
                actor="test",
            )
            self._holds.append((placed.hold_id, self.teams[which].pk))
        else:
            account, other = self.teams[which].pk, self.teams[1 - which].pk
            source, target = {
                "credit": (self._bank, account),
                "spend": (account, self._revenue),
                "move": (account, other),
            }[what]
            post_journal(**self._journal(source, target, amount))

    def _journal(self, source: int, target: int, amount: Decimal) -> dict[str, Any]:
        return {
            "scope": "model",
            "key": uuid.uuid4().hex,
            "kind": "test",
            "currency": "USD",
            "lines": [Line(source, -amount), Line(target, amount)],
            "actor": "test",
        }


@pytest.mark.django_db
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=st.lists(operations, max_size=25))
def test_the_books_do_what_the_model_does(work):
    books, model = Books(), Model()
    for what, which, amount in work:
        if what in {"void", "capture"} and which >= len(model.holds):
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
            assert now.available >= 0
    for index, team in enumerate(books.teams):
        page = entries_page(account_id=team.pk)
        assert (page.entries[0].balance if page.entries else 0) == model.posted[index]
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
    assert [result for result in verify_books() if not result.ok] == []
