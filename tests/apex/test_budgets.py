"""Budgets and limits as customers set them: REST and portal, one's own only."""

from decimal import Decimal

import pytest

from apex.portal.views.budgets import BudgetRow
from brokerage.models import Budget
from brokerage.services.budgets import BudgetStatus, set_budget
from tests.apex.conftest import make_team

JSON = "application/json"
NEW = {"period": "monthly", "amount": {"amount": "50.00", "currency": "USD"}}


@pytest.fixture
def acme(redis_client, db):
    return make_team("Acme")


@pytest.fixture
def other(acme):
    return make_team("Other")


def budget_of(team, amount="50", **more) -> Budget:
    wanted = {"period": Budget.Period.MONTHLY, "actor": None} | more
    return set_budget(customer=team.customer, amount=Decimal(amount), **wanted)


def problem(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:apex:problem:")


def test_budgets_are_set_shown_changed_and_removed(acme):
    api = acme.api()
    made = api.post("/v1/budgets", NEW, content_type=JSON)
    assert made.status_code == 201
    shown = made.json()
    assert shown["amount"] == shown["left"] == {"amount": "50.000000000", "currency": "USD"}
    assert (shown["api_key"], shown["period"], shown["spent"]["amount"]) == (None, "monthly", "0.000000000")
    assert shown["window_start"] < shown["window_end"]
    assert problem(api.post("/v1/budgets", NEW, content_type=JSON)) == (409, "budget-exists")
    of_key = NEW | {"api_key": str(acme.key.pk), "period": "daily"}
    assert api.post("/v1/budgets", of_key, content_type=JSON).json()["api_key"] == str(acme.key.pk)
    one = f"/v1/budgets/{shown['id']}"
    changed = api.patch(one, {"amount": {"amount": "7.5", "currency": "USD"}}, content_type=JSON)
    assert changed.json()["amount"]["amount"] == api.get(one).json()["amount"]["amount"] == "7.500000000"
    assert [each["period"] for each in api.get("/v1/budgets").json()["results"]] == ["daily", "monthly"]
    assert api.delete(one).status_code == 204
    assert problem(api.get(one)) == (404, "not-found")


def test_a_repeated_post_sets_one_budget(acme):
    headers = {"Idempotency-Key": "b-1"}
    first, again = [acme.api().post("/v1/budgets", NEW, content_type=JSON, headers=headers) for _ in range(2)]
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert Budget.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"amount": {"amount": 50, "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "-1", "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "1.0000000001", "currency": "USD"}}, "/amount/amount"),
        ({"amount": {"amount": "1"}}, "/amount/currency"),
        ({"period": "weekly"}, "/period"),
        ({"api_key": "x"}, "/api_key"),
        ({"api_key": "00000000-0000-4000-8000-000000000000"}, "/api_key"),
    ],
)
def test_bad_budgets_name_the_field(acme, change, pointer):
    answer = acme.api().post("/v1/budgets", NEW | change, content_type=JSON)
    assert problem(answer) == (400, "invalid-input")
    assert answer.json()["errors"][0]["pointer"] == pointer


def test_budgets_are_in_the_currency_of_the_credits(acme):
    body = NEW | {"amount": {"amount": "1", "currency": "EUR"}}
    assert problem(acme.api().post("/v1/budgets", body, content_type=JSON)) == (422, "wrong-currency")


def test_what_is_another_customers_is_not_there(acme, other):
    budget = budget_of(other, api_key=other.key)
    one, api = f"/v1/budgets/{budget.pk}", acme.api()
    assert api.get("/v1/budgets").json()["results"] == []
    assert problem(api.get(one)) == (404, "not-found")
    assert problem(api.delete(one)) == (404, "not-found")
    change = {"amount": {"amount": "1", "currency": "USD"}}
    assert problem(api.patch(one, change, content_type=JSON)) == (404, "not-found")
    stolen = api.post("/v1/budgets", NEW | {"api_key": str(other.key.pk)}, content_type=JSON)
    assert stolen.json()["errors"][0]["pointer"] == "/api_key"
    limits = api.patch(f"/v1/api-keys/{other.key.pk}", {"requests_per_minute": 1}, content_type=JSON)
    assert problem(limits) == (404, "not-found")
    portal = acme.portal()
    assert portal.post(f"/portal/budgets/{budget.pk}/remove/").status_code == 404
    assert portal.get(f"/portal/keys/{other.key.pk}/limits/").status_code == 404
    taken = portal.post(
        "/portal/budgets/", {"scope": f"key:{other.key.pk}", "period": "daily", "amount": "1"}
    )
    assert taken.status_code == 422
    assert list(Budget.objects.all()) == [budget]


def test_limits_of_a_key_change_one_by_one(acme):
    api, one = acme.api(), f"/v1/api-keys/{acme.key.pk}"
    both = {"requests_per_minute": 60, "concurrent_answers": 4}
    assert api.patch(one, both, content_type=JSON).json() | both == api.get(one).json()
    api.patch(one, {"requests_per_minute": None}, content_type=JSON)
    shown = api.get(one).json()
    assert (shown["requests_per_minute"], shown["concurrent_answers"]) == (None, 4)
    bad = api.patch(one, {"tokens_per_minute": 0}, content_type=JSON)
    assert bad.json()["errors"][0]["pointer"] == "/tokens_per_minute"


def test_the_portal_sets_shows_and_removes_budgets(acme):
    portal = acme.portal()
    assert "You have no budgets." in portal.get("/portal/budgets/").text
    key, project = f"key:{acme.key.pk}", f"project:{acme.key.project_id}"
    for scope, amount in (("all", "50"), (key, "5"), (key, "6"), (project, "7")):
        form = {"scope": scope, "period": "monthly", "amount": amount}
        assert portal.post("/portal/budgets/", form).status_code == 302
    page = portal.get("/portal/budgets/").text
    assert "50.00 USD" in page
    assert "6.00 USD" in page
    assert "7.00 USD" in page
    assert page.count("<progress") == 3
    refused = portal.post("/portal/budgets/", {"scope": "all", "period": "monthly", "amount": "-1"})
    assert refused.status_code == 422
    assert "id_amount_error" in refused.text
    for budget in Budget.objects.all():
        portal.post(f"/portal/budgets/{budget.pk}/remove/")
    assert not Budget.objects.exists()


def test_the_portal_sets_limits(acme):
    portal, page = acme.portal(), f"/portal/keys/{acme.key.pk}/limits/"
    assert portal.post(page, {"requests_per_minute": "0"}).status_code == 422
    assert portal.post(page, {"requests_per_minute": "30", "tokens_per_minute": ""}).status_code == 302
    assert "30 requests/min" in portal.get("/portal/keys/").text
    acme.key.refresh_from_db()
    assert (acme.key.requests_per_minute, acme.key.tokens_per_minute) == (30, None)


@pytest.mark.parametrize(
    ("amount", "spent", "held", "percent"),
    [("10", "2.5", "0", 25), ("10", "9", "3", 100), ("0", "0", "0", 100), ("3", "1", "0", 33)],
)
def test_the_bar_shows_what_is_used(amount, spent, held, percent):
    standing = BudgetStatus(1, Decimal(amount), Decimal(spent), Decimal(held), None, None)
    assert BudgetRow(Budget(), standing).used_percent == percent
