"""ledger_post, ledger_post_batch, reverse_journal: what they book, replay and refuse."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import psycopg
import pytest
from django.db import connection
from djmoney.money import Money

from ledger.errors import BadPosting, IdempotencyConflict, InsufficientFunds, PeriodClosed, translate
from ledger.models import Account, Hold, Journal
from ledger.selectors import account_balance, entries_page, wallet
from ledger.services import (
    JournalRequest,
    Line,
    close_period,
    create_hold,
    open_wallet,
    platform_account,
    post_journal,
    post_journals,
    reverse_journal,
    void_hold,
)
from tests.ledger.conftest import make_wallet, spend

pytestmark = pytest.mark.django_db


def post(lines: list[Line], **changed: object):
    request = {"scope": "test", "key": uuid.uuid4().hex, "kind": "usage", "currency": "USD", "actor": "test"}
    return post_journal(lines=lines, **(request | changed))


def test_it_works(revenue):
    team = make_wallet("10")
    posted = post(spend(team, revenue, "1.000000001"))
    assert not posted.replayed
    assert wallet(team.code).available == Decimal("8.999999999")
    assert account_balance(revenue) == Decimal("1.000000001")
    assert Journal.objects.get(pk=posted.journal_id).public_id == posted.public_id


def test_the_same_request_again_gives_the_first_result(revenue):
    team = make_wallet("10")
    first = post(spend(team, revenue, "1"), key="once")
    # Another worker, the lines in another order and with other zeros: still the same request.
    again = post(spend(team, revenue, "1.00")[::-1], key="once", actor="somebody else")
    assert (again.journal_id, again.replayed) == (first.journal_id, True)
    assert wallet(team.code).posted == 9


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"kind": "other"}, "kind"),
        ({"meta": {"a": 1}}, "meta"),
        ({"effective_at": datetime(2020, 1, 1, tzinfo=UTC)}, "effective_at"),
    ],
)
def test_another_request_under_the_same_key_is_a_conflict(revenue, changed, field):
    team = make_wallet("10")
    post(spend(team, revenue, "1"), key="once")
    with pytest.raises(IdempotencyConflict) as caught:
        post(spend(team, revenue, "1"), key="once", **changed)
    assert caught.value.fields == [field]
    with pytest.raises(IdempotencyConflict) as caught:
        post(spend(team, revenue, "2"), key="once", **changed)
    assert set(caught.value.fields) == {"lines", field}
    assert wallet(team.code).posted == 9


def test_a_wallet_is_not_overdrawn(revenue):
    team = make_wallet("10")
    create_hold(account=team, amount=Money("4", "USD"), key="h", ttl=timedelta(minutes=1), actor="test")
    with pytest.raises(InsufficientFunds) as caught:
        post(spend(team, revenue, "7.5"))
    assert (caught.value.available, caught.value.required, caught.value.shortfall) == (
        6,
        Decimal("7.5"),
        Decimal("1.5"),
    )
    post(spend(team, revenue, "6"))
    assert wallet(team.code).available == 0


def test_a_refusal_leaves_the_callers_transaction_usable(revenue):
    team = make_wallet("1")
    with pytest.raises(InsufficientFunds):
        post(spend(team, revenue, "2"))
    post(spend(team, revenue, "1"))


@pytest.mark.parametrize(
    ("amounts", "message"),
    [
        (["-1", "2"], "sum to 1"),
        (["-1"], "two or more"),
        ([], "two or more"),
        (["0", "0"], "zero"),
        (["-0.0000000001", "0.0000000001"], "digits"),
        (["NaN", "NaN"], "digits"),
        (["Infinity", "-Infinity"], "digits"),
        (["-1000000000000000", "1000000000000000"], "digits"),
    ],
)
def test_what_is_no_posting_is_refused(revenue, amounts, message):
    bank = platform_account(code="bank", currency="USD")
    lines = [Line(account.pk, Decimal(a)) for account, a in zip([bank, revenue], amounts, strict=False)]
    with pytest.raises(BadPosting, match=message):
        post(lines)


def test_unknown_accounts_and_foreign_currencies_are_refused(revenue):
    team = make_wallet("10")
    euro = platform_account(code="bank", currency="EUR")
    with pytest.raises(BadPosting, match="no account 999999"):
        post([Line(team.pk, Decimal(-1)), Line(999999, Decimal(1))])
    with pytest.raises(BadPosting, match=f"account {euro.pk} has another currency than USD"):
        post([Line(team.pk, Decimal(-1)), Line(euro.pk, Decimal(1))])
    with pytest.raises(BadPosting, match="three capital letters"):
        post(spend(team, revenue, "1"), currency="usd")
    with pytest.raises(BadPosting, match="key"):
        post(spend(team, revenue, "1"), key="")


def test_accounts_open_once_and_not_with_another_currency():
    code = f"customer_credit:{uuid.uuid4()}"
    first = open_wallet(code=code, owner="team", currency="USD")
    assert open_wallet(code=code, owner="team", currency="USD") == first
    with pytest.raises(IdempotencyConflict, match="currency"):
        open_wallet(code=code, owner="team", currency="EUR")
    assert platform_account(code="bank", currency="USD") == platform_account(code="bank", currency="USD")
    with pytest.raises(ValueError, match="not in the chart"):
        platform_account(code="petty_cash", currency="USD")


def test_a_batch_books_all_or_none_in_order(revenue):
    rich, poor = make_wallet("10"), make_wallet("1")
    requests = [request(rich, revenue, "1", key="a"), request(poor, revenue, "1", key="b")]
    posted = post_journals(requests)
    assert [p.replayed for p in posted] == [False, False]
    assert post_journals(requests) == [p.__class__(p.journal_id, True) for p in posted]
    with pytest.raises(InsufficientFunds, match="test/d"):
        post_journals([request(rich, revenue, "1", key="c"), request(poor, revenue, "1", key="d")])
    assert wallet(rich.code).posted == 9
    assert post_journals([]) == []


def request(
    team: Account, revenue: Account, amount: str, *, key: str, hold: int | None = None
) -> JournalRequest:
    return JournalRequest(
        "test", key, "usage", "USD", spend(team, revenue, amount), "test", capture_hold=hold
    )


def hold_on(team: Account, amount: str) -> int:
    placed = create_hold(
        account=team,
        amount=Money(amount, "USD"),
        key=uuid.uuid4().hex,
        ttl=timedelta(minutes=5),
        actor="test",
    )
    return placed.hold_id


def test_a_charge_takes_from_its_hold_and_releases_the_rest(revenue):
    team = make_wallet("10")
    hold = hold_on(team, "10")
    [posted] = post_journals([request(team, revenue, "3", key="a", hold=hold)])
    assert (wallet(team.code).posted, wallet(team.code).held) == (7, 0)
    captured = Hold.objects.get(pk=hold)
    assert (captured.state, captured.captured, captured.journal_id) == ("captured", 3, posted.journal_id)


def test_a_charge_whose_hold_was_released_still_comes_out_of_the_wallet(revenue):
    team = make_wallet("10")
    hold = hold_on(team, "10")
    void_hold(hold_id=hold)
    post_journals([request(team, revenue, "3", key="a", hold=hold)])
    assert wallet(team.code).posted == 7
    assert not Account.objects.filter(code=f"customer_receivable:{team.pk}").exists()


@pytest.mark.parametrize("left", ["0", "2"])
def test_a_delivery_that_the_wallet_cannot_pay_is_booked_as_a_debt(revenue, left):
    team = make_wallet("10")
    hold = hold_on(team, "5")
    void_hold(hold_id=hold)
    post(spend(team, revenue, str(10 - Decimal(left))))
    charge = request(team, revenue, "5", key="late", hold=hold)
    [posted] = post_journals([charge])
    debt = Account.objects.get(code=f"customer_receivable:{team.pk}")
    assert account_balance(debt) == Decimal(left) - 5
    assert wallet(team.code).posted == 0
    assert account_balance(revenue) == 15 - Decimal(left)
    assert post_journals([charge]) == [posted.__class__(posted.journal_id, True)]


def test_a_charge_above_its_hold_is_booked_and_the_hold_used_up(revenue):
    team = make_wallet("10")
    hold = hold_on(team, "2")
    post_journals([request(team, revenue, "3", key="a", hold=hold)])
    assert (wallet(team.code).posted, wallet(team.code).held) == (7, 0)
    assert Hold.objects.get(pk=hold).captured == 2


def test_a_hold_of_another_wallet_is_not_captured(revenue):
    team, other = make_wallet("10"), make_wallet("10")
    hold = hold_on(other, "2")
    with pytest.raises(BadPosting, match="no line takes from account"):
        post_journals([request(team, revenue, "1", key="a", hold=hold)])


def test_a_reversal_undoes_a_journal_once(revenue):
    team = make_wallet("10")
    posted = post(spend(team, revenue, "4"))
    undone = reverse_journal(journal_id=posted.journal_id, reason="wrong price", actor="staff")
    assert wallet(team.code).posted == 10
    assert reverse_journal(journal_id=posted.journal_id, reason="wrong price", actor="x").replayed
    assert Journal.objects.get(pk=undone.journal_id).reverses_id == posted.journal_id
    with pytest.raises(IdempotencyConflict):
        reverse_journal(journal_id=posted.journal_id, reason="another", actor="staff")
    with pytest.raises(BadPosting, match="itself a reversal"):
        reverse_journal(journal_id=undone.journal_id, reason="no", actor="staff")
    with pytest.raises(BadPosting, match="no journal 999999"):
        reverse_journal(journal_id=999999, reason="no", actor="staff")


def test_nothing_is_booked_into_a_closed_period(revenue):
    team = make_wallet("10")
    today = datetime.now(UTC)
    close_period(through=(today - timedelta(days=1)).date(), actor="staff")
    with pytest.raises(PeriodClosed, match="closed through"):
        post(spend(team, revenue, "1"), effective_at=today - timedelta(days=1))
    post(spend(team, revenue, "1"), effective_at=today)
    with pytest.raises(Exception, match="a period can be closed when it is over"):
        close_period(through=today.date(), actor="staff")


def test_history_comes_in_pages_with_running_balances(revenue):
    team = make_wallet("10")
    for amount in ("1", "2", "3"):
        post(spend(team, revenue, amount))
    first = entries_page(account_id=team.pk, limit=3)
    assert [(e.amount, e.balance) for e in first.entries] == [(-3, 4), (-2, 7), (-1, 9)]
    second = entries_page(account_id=team.pk, before=first.next_cursor, limit=3)
    assert [(e.amount, e.balance) for e in second.entries] == [(10, 10)]
    assert second.next_cursor is None


def test_callers_of_plain_psycopg_get_the_same_errors(revenue):
    team = make_wallet("1")
    with pytest.raises(Exception, match="is required") as caught, connection.cursor() as cursor:
        cursor.execute("SELECT hold_create(%s, 2, 'USD', 'k', '1 minute', 'me')", [team.pk])
    assert isinstance(caught.value.__cause__, psycopg.Error)
    meant = translate(caught.value.__cause__)
    assert isinstance(meant, InsufficientFunds)
    assert meant.shortfall == 1
    other = psycopg.OperationalError("gone")
    assert translate(other) is other


def test_wallets_that_are_not_there_are_named():
    with pytest.raises(Account.DoesNotExist, match="no wallet 'customer_credit:none'"):
        wallet("customer_credit:none")
