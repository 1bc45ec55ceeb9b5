"""Projects in the portal and by the API."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from brokerage.models import APIKey, Budget, Project
from brokerage.services.keys import issue_key
from brokerage.services.projects import create_project
from tests.apex.conftest import make_usage

pytestmark = pytest.mark.django_db
JSON = "application/json"


@pytest.fixture
def bot(acme) -> Project:
    return create_project(customer=acme.customer, name="Support bot", actor=acme.user)


def charged(team, key: APIKey, amount: str) -> None:
    make_usage(team, api_key=key, amount=Decimal(amount), journal_id=1, charged_at=datetime.now(UTC))


def test_the_portal_makes_shows_renames_and_archives(acme):
    portal = acme.portal()
    assert "Default" in portal.get("/portal/projects/").text
    made = portal.post("/portal/projects/", {"name": "Support bot"}, follow=True)
    assert "“Support bot” is there" in made.text
    assert "No key is in this project yet" in made.text
    assert "may spend whatever" in made.text
    bot = Project.objects.get(name="Support bot")
    taken = portal.post("/portal/projects/", {"name": "support BOT"})
    assert taken.status_code == 422
    assert "of this name already" in taken.text
    assert "id_name_error" in taken.text

    page = f"/portal/projects/{bot.pk}/"
    portal.post("/portal/keys/", {"name": "one", "mode": "live", "project": bot.pk})
    key = APIKey.objects.get(name="one")
    assert key.project == bot
    portal.post("/portal/budgets/", {"scope": f"project:{bot.pk}", "period": "daily", "amount": "3"})
    charged(acme, key, "0.25")
    charged(acme, acme.key, "0.5")
    shown = portal.get(page)
    assert "Last 30 days: 0.25 USD" in shown.text
    assert str(key) in shown.text
    assert str(acme.key) not in shown.text
    assert [row.api_key for row in shown.context["recent"]] == [key]
    assert shown.text.count("<progress") == 1

    assert portal.post(page, {"name": ""}).status_code == 422
    portal.post(page, {"name": "Helpdesk"})
    assert "Helpdesk" in portal.get("/portal/keys/").text
    assert "1 active key is revoked" in " ".join(portal.get(page + "archive/").text.split())
    told = portal.post(page + "archive/", follow=True)
    assert "“Helpdesk” is archived, and 1 key is revoked." in told.text
    assert "0.25 USD" in portal.get(page).text
    assert "Archive this project" not in portal.get(page).text
    # Nothing of it can be chosen any more.
    assert "Helpdesk</option>" not in portal.get("/portal/budgets/").text
    late = portal.post("/portal/keys/", {"name": "late", "mode": "live", "project": bot.pk})
    assert not APIKey.objects.filter(name="late", project=bot).exists()
    assert late.status_code in (200, 422)


def test_the_default_project_cannot_be_archived(acme):
    default = Project.objects.get(customer=acme.customer, is_default=True)
    assert acme.portal().post(f"/portal/projects/{default.pk}/archive/").status_code == 404
    refused = acme.api().delete(f"/v1/projects/{default.pk}")
    assert refused.status_code == 409
    assert "default project stays" in refused.json()["detail"]


def test_a_key_needs_no_choice_where_there_is_one_project(acme):
    portal = acme.portal()
    assert 'type="hidden" name="project"' in portal.get("/portal/keys/").text
    assert portal.post("/portal/keys/", {"name": "plain", "mode": "live"}).status_code == 200
    assert APIKey.objects.get(name="plain").project.is_default


def test_the_list_asks_the_same_few_questions_whatever_there_is(acme, django_assert_max_num_queries):
    for number in range(15):
        project = create_project(customer=acme.customer, name=f"P{number}", actor=None)
        key = issue_key(customer=acme.customer, project=project, name="k", actor=None).key
        charged(acme, key, "0.1")
    portal, api = acme.portal(), acme.api()
    with django_assert_max_num_queries(9):
        page = portal.get("/portal/projects/")
    assert page.text.count("0.10 USD") == 15
    with django_assert_max_num_queries(9):
        assert len(api.get("/v1/projects").json()["results"]) == 16


def test_the_api_makes_lists_renames_and_archives(acme, other):
    api = acme.api()
    headers = {"Idempotency-Key": "p1"}
    made = api.post("/v1/projects", {"name": "Support bot"}, content_type=JSON, headers=headers)
    assert made.status_code == 201
    again = api.post("/v1/projects", {"name": "Support bot"}, content_type=JSON, headers=headers)
    assert again.json() == made.json()
    one = f"/v1/projects/{made.json()['id']}"
    taken = api.post("/v1/projects", {"name": "SUPPORT bot"}, content_type=JSON)
    assert taken.status_code == 400
    assert taken.json()["errors"][0]["pointer"] == "/name"

    key = api.post("/v1/api-keys", {"name": "k", "project": made.json()["id"]}, content_type=JSON).json()
    assert key["project"] == made.json()["id"]
    foreign = other.api().post("/v1/api-keys", {"name": "k", "project": made.json()["id"]}, content_type=JSON)
    assert foreign.json()["errors"][0]["pointer"] == "/project"
    budget = {"project": made.json()["id"], "period": "daily", "amount": {"amount": "5", "currency": "USD"}}
    set_one = api.post("/v1/budgets", budget, content_type=JSON, headers={"Idempotency-Key": "b1"})
    assert (set_one.status_code, set_one.json()["project"]) == (201, made.json()["id"])
    both = budget | {"api_key": key["id"], "period": "monthly"}
    assert api.post("/v1/budgets", both, content_type=JSON).json()["errors"][0]["pointer"] == "/project"
    assert (
        other.api().post("/v1/budgets", budget, content_type=JSON).json()["errors"][0]["pointer"]
        == "/project"
    )

    mine = make_usage(acme, api_key=APIKey.objects.get(pk=key["id"]))
    make_usage(acme)
    told = api.get("/v1/usage", {"project": made.json()["id"]}).json()["results"]
    assert [row["id"] for row in told] == [str(mine.pk)]

    renamed = api.patch(one, {"name": "Helpdesk"}, content_type=JSON).json()
    assert (renamed["name"], renamed["active_keys"]) == ("Helpdesk", 1)
    assert [api.delete(one).status_code for _ in range(2)] == [204, 204]
    shown = api.get(one).json()
    assert shown["archived_at"] is not None
    assert shown["active_keys"] == 0
    late = api.post("/v1/api-keys", {"name": "late", "project": shown["id"]}, content_type=JSON)
    assert "is archived" in late.json()["errors"][0]["detail"]
    assert other.api().get(one).status_code == 404
    assert Budget.objects.filter(project=shown["id"]).exists()


def test_staff_find_and_archive_a_project(acme, bot, admin_client):
    issue_key(customer=acme.customer, project=bot, name="k", actor=None)
    assert "Support bot" in admin_client.get("/admin/brokerage/project/", {"q": "support"}).text
    assert "Support bot" in admin_client.get(f"/admin/brokerage/customer/{acme.customer.pk}/change/").text
    default = Project.objects.get(customer=acme.customer, is_default=True)
    form = {"action": "archive", "_selected_action": [bot.pk, default.pk]}
    told = admin_client.post("/admin/brokerage/project/", form, follow=True).text
    assert "is archived; keys revoked: 1." in told
    assert "The default project stays" in told
    bot.refresh_from_db()
    assert bot.archived_at is not None
