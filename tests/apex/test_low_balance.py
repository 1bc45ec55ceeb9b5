"""When credits run low: one mail per crossing, one purchase prepared and never paid by itself, a cap that holds."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.db import connections
from djmoney.money import Money

from brokerage.models import LowBalanceNotice, LowBalanceRule, Member, PreparedTopUp
from brokerage.services import topping_up
from brokerage.services.topping_up import month_start, set_low_balance_rule, watch_wallets
from ledger.models import Account, TopUp
from ledger.paypal import orders
from ledger.paypal.gateway import GatewayUnavailable
from ledger.services import Line, platform_account, post_journal
from tests.apex.conftest import Team, make_team
from tests.apex.test_api_money import Provider


def move(team: Team, amount: str) -> None:
    account = Account.objects.get(code=team.customer.wallet_code)
    against = platform_account(code="bank" if Decimal(amount) > 0 else "usage_revenue", currency="USD")
    lines = [Line(account.pk, Decimal(amount)), Line(against.pk, -Decimal(amount))]
    key = str(uuid.uuid4())
    post_journal(scope="test", key=key, kind="test", currency="USD", lines=lines, actor="test")


def rule(team: Team, notice: str | None = None, top_up: tuple[str, str, str] | None = None) -> None:
    below, amount, cap = map(Decimal, top_up) if top_up else (None, None, None)
    set_low_balance_rule(
        customer=team.customer,
        actor=team.user,
        notice_below=notice and Decimal(notice),
        top_up_below=below,
        top_up_amount=amount,
        monthly_cap=cap,
    )


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    double = Provider()
    monkeypatch.setattr(orders, "gateway", lambda rail: double)
    return double


def pay(provider: Provider, amount: str) -> None:
    top_up = TopUp.objects.get(state=TopUp.State.APPROVING)
    provider.pay(top_up.order_id, amount)
    orders.settle_top_up(top_up_id=top_up.pk)


def test_each_crossing_is_mailed_once_to_the_owners(acme, other):
    member = User.objects.create_user("member", "member@example.com")
    Member.objects.create(customer=acme.customer, user=member)
    move(acme, "10")
    rule(acme, "5")
    watch_wallets()
    assert mail.outbox == []
    for crossing in (1, 2):
        move(acme, "-8")
        watch_wallets()
        watch_wallets()
        assert [each.to for each in mail.outbox] == [[acme.user.email]] * crossing
        assert "below 5.00 USD" in acme.portal().get("/portal/keys/").text
        assert "below 5.00 USD" not in other.portal().get("/portal/keys/").text
        move(acme, "8")
        watch_wallets()
        assert "below 5.00 USD" not in acme.portal().get("/portal/keys/").text


def test_many_workers_at_once_mail_once_and_prepare_once(fresh_database, redis_client, provider):
    rule(make_team("Acme"), "5", ("5", "50", "100"))

    def work(_: int) -> None:
        watch_wallets()
        connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    watch_wallets()
    assert sorted(each.subject for each in mail.outbox) == [
        "A top-up waits for your approval",
        "Your Apex credits run low",
    ]
    assert len(provider.orders) == TopUp.objects.count() == PreparedTopUp.objects.count() == 1


def test_a_mail_that_failed_is_tried_again(acme, monkeypatch):
    rule(acme, "5")
    with monkeypatch.context() as patch:
        patch.setattr(topping_up, "send_mail", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError()))
        watch_wallets()
    assert LowBalanceNotice.objects.get().mailed_at is None
    watch_wallets()
    assert len(mail.outbox) == 1


def test_an_amount_that_paypal_cannot_take_stops_nobody_else(acme, other, provider, monkeypatch):
    def only_fifty(amount: Money) -> None:
        if amount.amount != 50:
            raise ValueError("not fifty")

    monkeypatch.setattr(provider, "check_amount", only_fifty)
    rule(acme, None, ("5", "49", "100"))
    rule(other, None, ("5", "50", "100"))
    watch_wallets()
    assert [each.to for each in mail.outbox] == [[other.user.email]]


def test_without_a_rule_nothing_happens(acme, provider):
    watch_wallets()
    assert mail.outbox == []
    assert not TopUp.objects.exists()


def test_a_prepared_purchase_waits_for_its_payer(acme, other, provider):
    rule(acme, None, ("5", "50", "100"))
    watch_wallets()
    [letter] = mail.outbox
    assert "https://pay.example/ORDER1" in letter.body
    assert "top-up of 50.00 USD waits for your approval" in acme.portal().get("/portal/").text
    assert "waits for your approval" not in other.portal().get("/portal/").text
    assert acme.api().get("/v1/balance").json()["posted"]["amount"] == "0.000000000"
    pay(provider, "50.00")
    watch_wallets()
    assert PreparedTopUp.objects.get().closed_at is not None
    assert "waits for your approval" not in acme.portal().get("/portal/").text


def test_the_cap_counts_what_was_paid_and_nothing_else(acme, provider):
    rule(acme, None, ("5", "50", "100"))
    for paid in (1, 2):
        watch_wallets()
        assert PreparedTopUp.objects.count() == paid
        pay(provider, "50.00")
        move(acme, "-50")
    watch_wallets()
    assert PreparedTopUp.objects.count() == 2
    assert len(mail.outbox) == 2


def test_a_lapsed_purchase_asks_again_only_after_the_balance_rose(acme, provider):
    rule(acme, None, ("5", "50", "50"))
    watch_wallets()
    TopUp.objects.update(state=TopUp.State.FAILED)
    watch_wallets()
    assert len(mail.outbox) == 1
    move(acme, "10")
    watch_wallets()
    move(acme, "-10")
    watch_wallets()
    assert len(mail.outbox) == 2


def test_a_crash_around_paypal_leaves_one_order(acme, provider, monkeypatch):
    rule(acme, None, ("5", "50", "100"))
    provider.trouble = GatewayUnavailable("away")
    watch_wallets()
    assert PreparedTopUp.objects.get().top_up is None
    provider.trouble = None
    with monkeypatch.context() as patch:

        def placed_and_killed(**purchase: object) -> None:
            orders.start_top_up(**purchase)
            raise KeyboardInterrupt

        patch.setattr(topping_up, "start_top_up", placed_and_killed)
        with pytest.raises(KeyboardInterrupt):
            watch_wallets()
    watch_wallets()
    assert len(provider.orders) == TopUp.objects.count() == 1
    assert len(mail.outbox) == 1


@pytest.mark.parametrize(
    ("zone", "now", "start"),
    [
        # Spring and autumn: the offset of the first is not the offset of the day.
        ("Europe/Berlin", datetime(2026, 3, 30, tzinfo=UTC), datetime(2026, 2, 28, 23, tzinfo=UTC)),
        ("Europe/Berlin", datetime(2026, 10, 31, 22, 59, tzinfo=UTC), datetime(2026, 9, 30, 22, tzinfo=UTC)),
        ("Europe/Berlin", datetime(2026, 10, 31, 23, tzinfo=UTC), datetime(2026, 10, 31, 23, tzinfo=UTC)),
        ("America/New_York", datetime(2026, 11, 1, 12, tzinfo=UTC), datetime(2026, 11, 1, 4, tzinfo=UTC)),
    ],
)
def test_months_begin_at_the_customers_midnight(acme, zone, now, start):
    acme.customer.time_zone = zone
    assert month_start(acme.customer, now) == start


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"notice_below": "-1"}, "notice_below"),
        ({"notice_below": "lots"}, "notice_below"),
        ({"notice_below": "1.005"}, "notice_below"),
        ({"top_up_below": "5"}, "top_up_amount"),
        ({"top_up_below": "5", "top_up_amount": "1", "monthly_cap": "10"}, "top_up_amount"),
        ({"top_up_below": "5", "top_up_amount": "50", "monthly_cap": "10"}, "monthly_cap"),
    ],
)
def test_bad_input_is_told_beside_its_field(acme, given, field):
    page = acme.portal().post("/portal/credits/low/", given)
    assert page.status_code == 422
    assert f'id="id_{field}_error"' in page.text
    assert not LowBalanceRule.objects.exists()


def test_an_owner_sets_the_rule_and_a_member_reads_it(acme):
    portal = acme.portal()
    assert portal.post("/portal/credits/low/", {"notice_below": "5"}).status_code == 302
    assert 'value="5.00"' in portal.get("/portal/credits/low/").text
    Member.objects.filter(customer=acme.customer).update(role=Member.Role.MEMBER)
    assert "Only owners of Acme" in portal.get("/portal/credits/low/").text
    assert portal.post("/portal/credits/low/", {"notice_below": "9"}).status_code == 403
    assert LowBalanceRule.objects.get().notice_below == 5
