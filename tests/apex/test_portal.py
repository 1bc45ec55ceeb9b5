"""The portal: what a customer sees, and only that."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from apex.portal.selectors import usage_by_day
from brokerage.models import APIKey, Member
from brokerage.services.charging import charge_usage
from brokerage.services.customers import suspend_customer
from tests.apex.conftest import make_team, make_usage
from tests.brokerage.factories import give_credit

pytestmark = pytest.mark.django_db


def test_a_new_customer_is_told_what_to_do(acme):
    page = acme.portal().get("/portal/")
    assert "Three steps to your first answer" in page.text
    assert "0.00 USD" in page.text
    assert "No answers yet" in page.text


def test_home_shows_the_figures_and_the_example(acme, settings):
    make_usage(acme, amount=Decimal("0.000033"), journal_id=1, charged_at=timezone.now())
    page = acme.portal().get("/portal/")
    assert "Three steps" not in page.text
    assert "0.000033 USD" in page.text
    assert f"{settings.GATEWAY_PUBLIC_URL}/v1/chat/completions" in page.text
    assert "gemma-test" in page.text


def test_home_asks_the_database_the_same_few_questions_whatever_there_is(acme, django_assert_max_num_queries):
    for minutes in range(20):
        make_usage(acme, minutes_ago=minutes * 1000)
    portal = acme.portal()
    with django_assert_max_num_queries(12):
        portal.get("/portal/")


def test_usage_by_day_has_every_day_and_counts_in_utc(acme, other):
    now = datetime.now(UTC)
    make_usage(acme)
    make_usage(acme, amount=Decimal("0.5"), journal_id=1, charged_at=now)
    make_usage(acme, minutes_ago=60 * 24 * 40)
    make_usage(other)
    days = usage_by_day(acme.customer)
    assert len(days) == 30
    assert days[-1].day == now.date()
    assert [(day.answers, day.tokens, day.cost) for day in days if day.answers] == [(2, 84, Decimal("0.5"))]
    assert days[0].day == now.date() - timedelta(days=29)


def test_usage_pages_hold_every_row_once(acme, other):
    mine = [make_usage(acme, minutes_ago=n, prompt_tokens=1000 + n) for n in range(60)]
    make_usage(other, prompt_tokens=777)
    portal, address, seen = acme.portal(), "/portal/usage/", []
    while address:
        page = portal.get(address)
        seen += [row.pk for row in page.context["page"].items]
        assert "777" not in page.text
        address = page.context["page"].older
    assert seen == [row.pk for row in mine]
    assert portal.get("/portal/usage/?cursor=nonsense").status_code == 404


def test_a_charge_on_the_statement_leads_to_its_answers_and_to_nobody_elses(acme, other):
    give_credit(acme.customer, "1")
    answers = [make_usage(acme, prompt_tokens=4321 + n) for n in range(3)]
    make_usage(other, prompt_tokens=7777)
    give_credit(other.customer, "1")
    charge_usage(limit=10)
    later = make_usage(acme, prompt_tokens=5555)
    charge_usage(limit=10)
    page = acme.portal().get("/portal/statement/").text
    assert "1 answer<" in page
    [address] = re.findall(r'href="([^"]+charge=[^"]+)">3 answers<', page)
    rows = acme.portal().get(address).context["page"].items
    assert {row.pk for row in rows} == {answer.pk for answer in answers} != {later.pk}
    assert "none of yours" in other.portal().get(address).text
    assert acme.portal().get("/portal/usage/?charge=nonsense").status_code == 404

    entry = acme.api().get("/v1/entries").json()["results"][1]
    assert entry["lines"] == 3
    told = acme.api().get("/v1/usage", {"journal": entry["journal"]}).json()["results"]
    assert {row["id"] for row in told} == {str(answer.pk) for answer in answers}
    assert other.api().get("/v1/usage", {"journal": entry["journal"]}).json()["results"] == []
    assert acme.api().get("/v1/usage", {"journal": "x"}).status_code == 400


def test_statement_follows_bad_positions_nowhere(acme):
    portal = acme.portal()
    assert "Nothing has been booked yet" in portal.get("/portal/statement/").text
    for bad in ("x", "-1", "9" * 30, ""):
        assert portal.get("/portal/statement/", {"before": bad}).status_code == 404


def test_key_is_shown_once(acme):
    portal = acme.portal()
    page = portal.post("/portal/keys/", {"name": "staging", "mode": "test"})
    [secret] = re.findall(r"apx_test_\w{38}", page.text)
    assert secret not in portal.get("/portal/keys/").text
    key = APIKey.objects.get(name="staging")
    assert (key.customer, key.created_by, key.mode) == (acme.customer, acme.user, "test")


@pytest.mark.parametrize("name", ["", " ", "x" * 101])
def test_key_needs_a_name(acme, name):
    page = acme.portal().post("/portal/keys/", {"name": name, "mode": "live"})
    assert page.status_code == 422
    assert 'id="id_name_error"' in page.text
    assert APIKey.objects.count() == 1


def test_revoking_asks_first(acme):
    portal = acme.portal()
    address = f"/portal/keys/{acme.key.pk}/revoke/"
    assert "cannot be undone" in portal.get(address).text
    acme.key.refresh_from_db()
    assert acme.key.revoked_at is None
    assert "is revoked" in portal.post(address, follow=True).text
    acme.key.refresh_from_db()
    assert acme.key.revoked_at is not None
    assert "revoked already" in portal.post(address, follow=True).text


def test_person_of_two_teams_switches(acme, other):
    Member.objects.create(customer=other.customer, user=acme.user)
    portal = acme.portal()
    assert "<h1>Acme</h1>" in portal.get("/portal/").text
    assert portal.post("/portal/switch/", {"customer": other.customer.pk}).url == "/portal/"
    assert "<h1>Other</h1>" in portal.get("/portal/").text
    Member.objects.filter(customer=other.customer, user=acme.user).delete()
    assert "<h1>Acme</h1>" in portal.get("/portal/").text


def test_person_of_no_team_is_told_what_to_do(client, redis_client):
    client.force_login(User.objects.create_user("loner"))
    for path in ("/portal/", "/portal/keys/", "/portal/credits/"):
        assert "You belong to no team yet" in client.get(path).text


def test_suspended_team_is_told(acme):
    suspend_customer(customer=acme.customer, actor=acme.user)
    assert "This team is suspended" in acme.portal().get("/portal/").text


def test_names_are_shown_and_never_run(redis_client):
    team = make_team("<script>alert(1)</script>")
    page = team.portal().get("/portal/")
    assert "<script>alert(1)" not in page.text
    assert "&lt;script&gt;alert(1)" in page.text
