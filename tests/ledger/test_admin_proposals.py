"""Corrections by hand, as two clerks do them in the back office."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from ledger.models import Account, Proposal
from ledger.selectors import wallet
from tests.ledger.conftest import make_wallet
from tests.ledger.test_proposals import WHY, adjustment

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def plain_static_files(settings):
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    }


def clerk(name: str, *rights: str) -> Client:
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(codename__in=["view_proposal", "view_account", *rights])
    )
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def ann(db) -> Client:
    return clerk("ann", "add_proposal", "change_proposal")


@pytest.fixture
def bob(db) -> Client:
    return clerk("bob", "change_proposal")


def fill_in(client: Client, team: Account, **changes: str):
    fields = {"wallet": team.code, "amount": "5", "counter": "promo_expense", "reason": WHY, **changes}
    return client.post(reverse("admin:ledger_propose", args=["adjustment"]), fields)


def decide(client: Client, proposal: Proposal, decision: str):
    url = reverse("admin:ledger_decide", args=[proposal.pk])
    return client.post(url, {"decision": decision, "note": "ok"}, follow=True)


def test_from_the_wallets_page_to_the_money(ann, bob):
    team = make_wallet("1")
    page = ann.get(reverse("admin:ledger_account_change", args=[team.pk])).content.decode()
    link = reverse("admin:ledger_propose", args=["adjustment"]) + f"?wallet={team.code}"
    assert link.replace(":", "%3A") in page or link in page
    assert team.code in ann.get(link).content.decode()
    answer = fill_in(ann, team)
    proposal = Proposal.objects.get()
    assert answer.url == reverse("admin:ledger_proposal_change", args=[proposal.pk])
    own = ann.get(answer.url).content.decode()
    assert "Another person has to approve it" in own
    assert 'value="approve"' not in own
    assert 'value="approve"' in bob.get(answer.url).content.decode()
    assert "Approved, and done." in decide(bob, proposal, "approve").content.decode()
    assert wallet(team.code).posted == 6


def test_pressing_the_button_on_ones_own_is_refused_in_words(ann):
    team = make_wallet()
    fill_in(ann, team)
    said = decide(ann, Proposal.objects.get(), "approve").content.decode()
    assert "another person has to approve it" in said
    assert wallet(team.code).posted == 0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("wallet", "nobody", "There is no wallet"),
        ("wallet", "bank:USD", "There is no wallet"),
        ("amount", "0", "Zero moves nothing"),
        ("amount", "0.0000000001", "9 decimal places"),
        ("amount", "much", "Enter a number"),
        ("counter", "customer_credit", "valid choice"),
        ("reason", "because", "at least 10"),
    ],
)
def test_bad_input_is_told_beside_the_field_and_kept(ann, field, value, says):
    team = make_wallet()
    answer = fill_in(ann, team, **{field: value})
    assert answer.status_code == 422
    page = answer.content.decode()
    assert f'id="id_{field}_error"' in page
    assert says in page
    assert value in page
    assert not Proposal.objects.exists()


def test_what_the_books_refuse_is_told_and_the_proposal_stays(ann, bob):
    team = make_wallet("3")
    fill_in(ann, team, amount="-4")
    said = decide(bob, Proposal.objects.get(), "approve").content.decode()
    assert "Nothing was done." in said
    assert "available" in said
    assert Proposal.objects.get().state == "open"


def test_without_the_right_nobody_proposes_or_decides(bob):
    team = make_wallet()
    assert bob.get(reverse("admin:ledger_propose", args=["adjustment"])).status_code == 403
    assert fill_in(bob, team).status_code == 403
    reader = clerk("carol")
    proposal = adjustment(team)
    assert decide(reader, proposal, "approve").status_code == 403
    assert decide(reader, proposal, "reject").status_code == 403
    proposal.refresh_from_db()
    assert proposal.state == "open"


def test_above_the_limit_the_page_says_who_has_to_approve(ann, bob):
    team = make_wallet()
    fill_in(ann, team, amount="1000.01")
    proposal = Proposal.objects.get()
    page = bob.get(reverse("admin:ledger_proposal_change", args=[proposal.pk])).content.decode()
    assert "above the limit of 1000" in page
    assert 'value="approve"' not in page
    assert "above the limit" in decide(bob, proposal, "approve").content.decode()
    chief = clerk("chief", "change_proposal", "decide_large_proposal")
    assert "Approved, and done." in decide(chief, proposal, "approve").content.decode()


def test_a_decision_needs_the_forms_token(ann):
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(User.objects.get(username="ann"))
    assert decide(browser, adjustment(make_wallet()), "reject").status_code == 403


def test_an_unknown_kind_has_no_page(ann):
    assert ann.get(reverse("admin:ledger_propose", args=["gift"])).status_code == 404
