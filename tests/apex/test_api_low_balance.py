"""The rule for low credits, by the API."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User

from brokerage.models import LowBalanceRule, Member

pytestmark = pytest.mark.django_db
ADDRESS, JSON = "/v1/low-balance", "application/json"
OFF = dict.fromkeys(("notice_below", "top_up_below", "top_up_amount", "monthly_cap"))


def usd(amount: str) -> dict[str, str]:
    return {"amount": amount, "currency": "USD"}


def put(client, **changes: object):
    return client.put(ADDRESS, OFF | changes, content_type=JSON)


def test_it_is_off_until_it_is_set_and_off_again(acme):
    api = acme.api()
    assert api.get(ADDRESS).json() == OFF | {"paid_this_month": usd("0.000000000")}
    rule = {
        "notice_below": usd("20"),
        "top_up_below": usd("10"),
        "top_up_amount": usd("25"),
        "monthly_cap": usd("100"),
    }
    for _ in range(2):  # as often as one likes
        assert put(api, **rule).json()["monthly_cap"] == usd("100.000000000")
    assert LowBalanceRule.objects.get(customer=acme.customer).top_up_amount == 25
    assert put(api).json() == OFF | {"paid_this_month": usd("0.000000000")}


@pytest.mark.parametrize(
    ("wrong", "pointer"),
    [
        ({"notice_below": usd("0")}, "/notice_below"),
        ({"notice_below": {"amount": 20, "currency": "USD"}}, "/notice_below/amount"),
        ({"top_up_below": usd("5")}, "/monthly_cap"),
        ({"top_up_below": usd("5"), "top_up_amount": usd("25"), "monthly_cap": usd("10")}, "/monthly_cap"),
        ({"top_up_below": usd("5"), "top_up_amount": usd("0.5"), "monthly_cap": usd("10")}, "/top_up_amount"),
    ],
)
def test_what_is_wrong_is_said_where_it_is_and_nothing_is_changed(acme, wrong, pointer):
    api = acme.api()
    put(api, notice_below=usd("7"))
    refused = put(api, **wrong)
    assert refused.status_code == 400
    assert pointer in {error["pointer"] for error in refused.json()["errors"]}
    assert api.get(ADDRESS).json()["notice_below"] == usd("7.000000000")


def test_another_currency_is_refused(acme):
    assert (
        put(acme.api(), notice_below={"amount": "5", "currency": "EUR"})
        .json()["type"]
        .endswith("wrong-currency")
    )


def test_everybody_sees_it_and_owners_change_it(acme, other):
    put(acme.api(), notice_below=usd("7"))
    assert other.api().get(ADDRESS).json()["notice_below"] is None
    colleague = User.objects.create_user("colleague", "c@example.com", "correct horse 7")
    Member.objects.create(customer=acme.customer, user=colleague, role=Member.Role.MEMBER)
    client = acme.portal()
    assert put(client, notice_below=usd("8")).status_code == 200
    client.force_login(colleague)
    assert client.get(ADDRESS).json()["notice_below"] == usd("8.000000000")
    assert put(client, notice_below=usd("9")).status_code == 403
