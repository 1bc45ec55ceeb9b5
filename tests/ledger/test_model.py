"""Random work on the books, against a model of thirty lines."""

from __future__ import annotations

import uuid
from datetime import timedelta
from decimal import Decimal

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


@pytest.mark.django_db
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=st.lists(operations, max_size=25))
def test_the_books_do_what_the_model_does(work):
    bank, revenue = (platform_account(code=code, currency="USD") for code in ("bank", "usage_revenue"))
    teams, model, hold_ids = [make_wallet(), make_wallet()], Model(), []
    for what, which, amount in work:
        if what in {"void", "capture"} and which >= len(hold_ids):
            continue
        journal = {
            "scope": "model",
            "key": uuid.uuid4().hex,
            "kind": what,
            "currency": "USD",
            "actor": "test",
        }

        def lines(source: int, target: int, amount: Decimal = amount) -> list[Line]:
            return [Line(source, -amount), Line(target, amount)]

        def act(what=what, which=which, amount=amount, journal=journal, lines=lines) -> None:
            if what == "credit":
                post_journal(lines=lines(bank.pk, teams[which].pk), **journal)
            elif what == "spend":
                post_journal(lines=lines(teams[which].pk, revenue.pk), **journal)
            elif what == "move":
                post_journal(lines=lines(teams[which].pk, teams[1 - which].pk), **journal)
            elif what == "hold":
                placed = create_hold(
                    account=teams[which], amount=Money(amount, "USD"), key=journal["key"],
                    ttl=timedelta(hours=1), actor="test",
                )  # fmt: skip
                hold_ids.append(placed.hold_id)
            elif what == "void":
                void_hold(hold_id=hold_ids[which])
            else:
                owner = teams[model_owner(model, which)].pk
                capture_hold(hold_id=hold_ids[which], lines=lines(owner, revenue.pk), **journal)

        refusal = model.apply(what, which, amount)
        if refusal is None:
            act()
        else:
            with pytest.raises(refusal):
                act()
        for team, index in zip(teams, (0, 1), strict=True):
            now = wallet(team.code)
            assert (now.posted, now.held) == (model.posted[index], model.held(index))
            assert now.available >= 0
    for index, team in enumerate(teams):
        page = entries_page(account_id=team.pk)
        assert (page.entries[0].balance if page.entries else 0) == model.posted[index]
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
    assert [result for result in verify_books() if not result.ok] == []


def model_owner(model: Model, hold: int) -> int:
    return model.holds[hold][0]
