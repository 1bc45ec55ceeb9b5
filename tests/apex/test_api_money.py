"""Balance, entries, holds and purchases, against real books and a payment provider that is a double."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from djmoney.money import Money

from ledger.models import Account, InboundEvent, TopUp
from ledger.paypal.gateway import (
    Capture,
    CaptureStatus,
    GatewayRefused,
    GatewayUnavailable,
    Order,
    OrderStatus,
    PaymentGateway,
)
from ledger.paypal.orders import settle_top_up
from ledger.services import Line, create_hold, platform_account, post_journal
from tests.apex.conftest import Team

pytestmark = pytest.mark.django_db


class Provider(PaymentGateway):
    """Takes orders in memory; `pay` is what the payer does at the provider's site."""

    provider = "paypal"
    rail = "orders"

    def __init__(self) -> None:
        self.orders: dict[str, Order] = {}
        self.by_request: dict[str, str] = {}
        self.trouble: Exception | None = None

    def check_amount(self, amount: Money) -> None: ...

    def create_order(self, *, amount, reference, request_id, return_url, cancel_url) -> Order:
        if self.trouble:
            raise self.trouble
        if request_id not in self.by_request:
            order_id = f"ORDER{len(self.orders) + 1}"
            self.by_request[request_id] = order_id
            url = f"https://pay.example/{order_id}"
            self.orders[order_id] = Order(order_id, OrderStatus.OPEN, url, reference, [])
        return self.orders[self.by_request[request_id]]

    def read_order(self, order_id: str) -> Order:
        return self.orders[order_id]

    def capture_order(self, order_id: str, *, request_id: str) -> Order:
        raise AssertionError("paid orders are captured already here")

    def pay(self, order_id: str, gross: str) -> None:
        capture = Capture(
            f"CAP-{order_id}",
            CaptureStatus.COMPLETED,
            "USD",
            Decimal(gross),
            Decimal("1.00"),
            datetime.now(UTC),
        )
        old = self.orders[order_id]
        self.orders[order_id] = Order(order_id, OrderStatus.COMPLETED, "", old.reference, [capture])


@pytest.fixture
def provider(monkeypatch) -> Provider:
    double = Provider()
    monkeypatch.setattr("ledger.paypal.orders.gateway", lambda rail: double)
    return double


def credit(team: Team, amount: str, key: str = "1") -> None:
    wallet = Account.objects.get(code=team.customer.wallet_code)
    source = platform_account(code="promo_deferred", currency="USD")
    lines = [Line(wallet.pk, Decimal(amount)), Line(source.pk, -Decimal(amount))]
    post_journal(scope="test", key=key, kind="top_up", currency="USD", lines=lines, actor="test")


def usd(amount: str) -> dict[str, str]:
    return {"amount": amount, "currency": "USD"}


def buy(team: Team, body: object, key: str | None = "k1"):
    headers = {"idempotency-key": key} if key else {}
    return team.api().post("/v1/topups", body, content_type="application/json", headers=headers)


ORDER_25 = {"amount": {"amount": "25.00", "currency": "USD"}}


def test_balance(acme):
    credit(acme, "12.34")
    wallet = Account.objects.get(code=acme.customer.wallet_code)
    create_hold(account=wallet, amount=Money("0.34", "USD"), key="h", ttl=timedelta(minutes=5), actor="test")
    assert acme.api().get("/v1/balance").json() == {
        "posted": usd("12.340000000"),
        "held": usd("0.340000000"),
        "available": usd("12.000000000"),
        "granted": usd("0.000000000"),
        "pending": usd("0.000000000"),
        "grants": [],
    }
    [hold] = acme.api().get("/v1/holds").json()["results"]
    assert (hold["state"], hold["amount"]) == ("open", usd("0.340000000"))


def test_entries_carry_the_balance_and_pages_hold_each_once(acme, other):
    for number in range(5):
        credit(acme, "1.5", key=str(number))
    credit(other, "99", key="other")
    seen, address = [], "/v1/entries?limit=2"
    while address:
        page = acme.api().get(address).json()
        seen += page["results"]
        address = page["next"]
    assert [entry["balance"]["amount"] for entry in seen] == [
        f"{total}00000000" for total in ("7.5", "6.0", "4.5", "3.0", "1.5")
    ]
    assert len({entry["id"] for entry in seen}) == 5
    assert {entry["kind"] for entry in seen} == {"top_up"}


def test_a_purchase_from_start_to_credit(acme, provider):
    started = buy(acme, ORDER_25)
    assert started.status_code == 201
    body = started.json()
    assert (body["state"], body["amount"]) == ("approving", usd("25.000000000"))
    assert body["approve_url"] == "https://pay.example/ORDER1"
    provider.pay("ORDER1", "25.00")
    settle_top_up(top_up_id=TopUp.objects.get().pk)
    assert acme.api().get(f"/v1/topups/{body['id']}").json()["state"] == "settled"
    assert acme.api().get("/v1/balance").json()["available"] == usd("25.000000000")
    assert len(acme.api().get("/v1/topups").json()["results"]) == 1


def test_a_repeated_purchase_is_one(acme, provider):
    first, second = buy(acme, ORDER_25), buy(acme, ORDER_25)
    assert second.json() == first.json()
    assert second.headers["Idempotent-Replayed"] == "true"
    assert (len(provider.orders), TopUp.objects.count()) == (1, 1)


def test_two_keys_are_two_purchases(acme, provider):
    assert buy(acme, ORDER_25, "k1").json()["id"] != buy(acme, ORDER_25, "k2").json()["id"]


def test_a_purchase_needs_a_key(acme, provider):
    answer = buy(acme, ORDER_25, key=None)
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:apex:problem:idempotency-key-missing")
    assert TopUp.objects.count() == 0


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/amount"),
        ({"amount": "25"}, "/amount"),
        ({"amount": {"amount": 25, "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "4.99", "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "5000.01", "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "25.001", "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "NaN", "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "1e2", "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "25", "currency": "EUR"}}, "/amount/currency"),
        ([], ""),
    ],
)
def test_bad_amounts_name_the_field(acme, provider, body, pointer):
    answer = buy(acme, body)
    assert answer.status_code == 400
    assert pointer in [error["pointer"] for error in answer.json()["errors"]]
    assert TopUp.objects.count() == 0


@pytest.mark.parametrize("trouble", [GatewayUnavailable("no answer"), GatewayRefused("PAYEE_BLOCKED")])
def test_provider_in_trouble(acme, provider, trouble):
    provider.trouble = trouble
    answer = buy(acme, ORDER_25)
    assert (answer.status_code, answer.json()["type"]) == (502, "urn:apex:problem:payment-provider")
    assert "PAYEE_BLOCKED" not in answer.text


def test_after_an_outage_the_same_key_goes_on(acme, provider):
    provider.trouble = GatewayUnavailable("no answer")
    assert buy(acme, ORDER_25).status_code == 502
    provider.trouble = None
    assert buy(acme, ORDER_25).json()["state"] == "approving"
    assert TopUp.objects.count() == 1


# --- the same from the portal ---


def form(portal, amount: str) -> dict[str, str]:
    page = portal.get("/portal/credits/")
    return {"amount": amount, "token": str(page.context["form"]["token"].value())}


def test_the_form_leads_to_the_provider_and_a_double_click_is_one_purchase(acme, provider):
    portal = acme.portal()
    fields = form(portal, "25")
    first, second = portal.post("/portal/credits/", fields), portal.post("/portal/credits/", fields)
    assert first.url == second.url == "https://pay.example/ORDER1"
    assert TopUp.objects.count() == 1


@pytest.mark.parametrize("amount", ["4.99", "5000.01", "x", "", "25.001"])
def test_bad_amount_is_told_beside_the_field(acme, provider, amount):
    portal = acme.portal()
    page = portal.post("/portal/credits/", form(portal, amount))
    assert page.status_code == 422
    assert 'id="id_amount_error"' in page.text
    assert TopUp.objects.count() == 0


def test_a_changed_amount_is_another_purchase(acme, provider):
    portal = acme.portal()
    fields = form(portal, "25")
    portal.post("/portal/credits/", fields)
    page = portal.post("/portal/credits/", fields | {"amount": "30"})
    assert page.status_code == 409
    assert str(page.context["form"]["token"].value()) != fields["token"]


def test_provider_in_trouble_is_told_and_can_be_tried_again(acme, provider):
    portal = acme.portal()
    fields = form(portal, "25")
    provider.trouble = GatewayUnavailable("no answer")
    page = portal.post("/portal/credits/", fields)
    assert page.status_code == 502
    assert "Nothing was charged" in page.text
    provider.trouble = None
    assert portal.post("/portal/credits/", fields).status_code == 302


def test_coming_back_credits_nothing_by_itself_and_shows_progress(acme, provider, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(
        "ledger.tasks.apply_event.delay",
        lambda event_id: asked.append(InboundEvent.objects.get(pk=event_id).about),
    )
    monkeypatch.setattr("django.db.transaction.on_commit", lambda work, **_: work())
    portal = acme.portal()
    portal.post("/portal/credits/", form(portal, "25"))
    page = portal.get("/portal/credits/return/?token=ORDER1&PayerID=P", follow=True)
    top_up = TopUp.objects.get()
    assert asked == ["ORDER1"]
    assert 'hx-trigger="every 1s"' in page.text
    assert acme.api().get("/v1/balance").json()["posted"] == usd("0.000000000")
    provider.pay("ORDER1", "25.00")
    settle_top_up(top_up_id=top_up.pk)
    part = portal.get(f"/portal/credits/{top_up.public_id}/", headers={"HX-Request": "true"})
    assert "25.00 USD" in part.text
    assert "hx-trigger" not in part.text


def test_coming_back_with_anothers_order_finds_nothing(acme, other, provider):
    buy(acme, ORDER_25)
    assert other.portal().get("/portal/credits/return/?token=ORDER1").status_code == 404
    assert acme.portal().get("/portal/credits/return/").status_code == 404
