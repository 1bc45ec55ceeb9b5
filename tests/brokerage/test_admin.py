"""The back office: actions go through services, books are only shown, pages cost a fixed number of queries."""

import html
import re
from datetime import UTC, datetime

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from brokerage.models import (
    APIKey,
    Customer,
    EvictionNotice,
    LegCost,
    Member,
    ModelPrice,
    Node,
    PilotApplication,
    Reroute,
    ServedModel,
)
from brokerage.services.customers import apply_for_pilot
from brokerage.services.keys import parse_key
from tests.brokerage import factories

pytestmark = pytest.mark.django_db

PAGES = [
    "pilotapplication",
    "customer",
    "member",
    "apikey",
    "servedmodel",
    "modelprice",
    "node",
    "evictionnotice",
    "reroute",
    "usageevent",
]


@pytest.fixture
def office(client):
    client.force_login(factories.make_staff())
    return client


def url(model: str, page: str = "changelist", *args) -> str:
    return reverse(f"admin:brokerage_{model}_{page}", args=args)


def act(office, model: str, action: str, *pks) -> str:
    """Runs an action and returns what the page then says."""
    return text(office.post(url(model), {"action": action, "_selected_action": pks}, follow=True))


def text(response) -> str:
    assert response.status_code == 200
    return html.unescape(re.sub(r"<[^>]+>", "", response.content.decode()))


def apply(number: int = 0) -> PilotApplication:
    return apply_for_pilot(
        name="Ada", email=f"ada{number}@example.com", company=f"Engines {number}", use_case="Tables"
    )


def test_approving_shows_the_key_once(office):
    application = apply()
    page = act(office, "pilotapplication", "approve", application.pk)
    (plaintext,) = re.findall(r"apx_live_\w+", page)
    assert bytes(APIKey.objects.get().key_hash) == parse_key(plaintext).digest
    assert "apx_live_" + plaintext[9:15] not in text(office.get(url("pilotapplication")))


def test_a_second_approval_says_that_it_was_decided(office):
    application = apply()
    act(office, "pilotapplication", "approve", application.pk)
    page = act(office, "pilotapplication", "approve", application.pk)
    assert "Engines 0 was approved already" in page
    assert "apx_live_" not in page
    assert Customer.objects.count() == 1


def test_declining(office):
    application = apply()
    assert "Engines 0 is declined" in act(office, "pilotapplication", "decline", application.pk)
    assert "Engines 0 was declined already" in act(office, "pilotapplication", "approve", application.pk)
    assert not Customer.objects.exists()


def test_issuing_and_revoking_a_key(office):
    customer = factories.make_customer()
    page = text(
        office.post(
            url("apikey", "add"), {"customer": customer.pk, "name": "laptop", "mode": "live"}, follow=True
        )
    )
    (plaintext,) = re.findall(r"apx_live_\w{38}", page)
    key = APIKey.objects.get()
    assert bytes(key.key_hash) == parse_key(plaintext).digest
    assert key.created_by.username == "clerk@apex.local"
    assert "1 revoked" in act(office, "apikey", "revoke", key.pk)
    assert "0 revoked" in act(office, "apikey", "revoke", key.pk)


def test_suspending_and_reinstating(office):
    customer = factories.make_customer()
    assert "1 suspended" in act(office, "customer", "suspend", customer.pk)
    assert "1 reinstated" in act(office, "customer", "reinstate", customer.pk)


def test_adding_a_member(office):
    customer = factories.make_customer()
    form = {"customer": customer.pk, "email": "bob@example.com", "role": "member"}
    assert "was added" in text(office.post(url("member", "add"), form, follow=True))
    assert Member.objects.get().user.email == "bob@example.com"


def test_a_new_price_ends_the_one_before(office):
    model = factories.make_model()
    for rate in ("0.0000006", "0.0000007"):
        form = {
            "served_model": model.pk,
            "currency": "USD",
            "prompt_rate": "0.0000002",
            "completion_rate": rate,
        }
        text(office.post(url("modelprice", "add"), form, follow=True))
    old, new = ModelPrice.objects.order_by("id")
    assert old.valid.upper == new.valid.lower
    assert new.valid.upper is None


def test_publishing_and_changing_a_model(office):
    text(
        office.post(
            url("servedmodel", "add"), {"name": "gemma", "context_tokens": 2048, **_no_prices()}, follow=True
        )
    )
    model = ServedModel.objects.get()
    change = {"context_tokens": 4096, "description": "small", "tokenizer_id": "", **_no_prices()}
    text(office.post(url("servedmodel", "change", model.pk), change, follow=True))
    model.refresh_from_db()
    assert (model.context_tokens, model.enabled) == (4096, False)
    assert factories.audit_actions()[-2:] == ["model.published", "model.changed"]


def _no_prices() -> dict[str, int]:
    return {"prices-TOTAL_FORMS": 0, "prices-INITIAL_FORMS": 0}


def test_registering_and_draining_a_node(office):
    model = factories.make_model()
    form = {"name": "node-a", "served_model": model.pk, "provider": "mesh", "zone": "", "hourly_rate": "0.35"}
    text(office.post(url("node", "add"), form, follow=True))
    node = Node.objects.get()
    assert (node.state, str(node.hourly_rate)) == ("expected", "0.350000000")
    Node.objects.update(state="ready", epoch=5)
    assert "1 told to drain" in act(office, "node", "drain", node.pk)
    node.refresh_from_db()
    assert (node.state, node.state_reason) == ("draining", "drained by clerk@apex.local")


@pytest.fixture
def usage():
    customer = factories.make_customer()
    usage = factories.make_usage(customer, factories.make_price(factories.make_model()))
    LegCost.objects.create(
        usage=usage, number=1, node="node-a", prompt_tokens=1, completion_tokens=1, ended="completed"
    )
    return usage


def test_usage_is_shown_and_never_edited(office, usage):
    page = text(office.get(url("usageevent", "change", usage.pk)))
    assert "node-a" in page
    assert office.post(url("usageevent", "change", usage.pk), {"amount": "0"}).status_code == 403
    assert office.post(url("usageevent", "delete", usage.pk), {"post": "yes"}).status_code == 403
    assert office.get(url("usageevent", "add")).status_code == 403


def test_nobody_else_gets_in(client, usage):
    client.force_login(usage.customer.members.create(user=factories.User.objects.create_user("bob")).user)
    for page in PAGES:
        assert client.get(url(page)).status_code == 302


def test_a_clerk_who_may_only_look_has_no_actions(client):
    from django.contrib.auth.models import Permission

    clerk = factories.User.objects.create_user("looker", is_staff=True)
    clerk.user_permissions.add(Permission.objects.get(codename="view_pilotapplication"))
    client.force_login(clerk)
    application = apply()
    client.post(
        url("pilotapplication"), {"action": "approve", "_selected_action": [application.pk]}, follow=True
    )
    application.refresh_from_db()
    assert application.state == "new"


def fill(numbers: range) -> None:
    """One row more of everything for each number, with a relation of its own where there is one."""
    moment = datetime(2026, 12, 1, tzinfo=UTC)
    for number in numbers:
        apply(number)
        customer = factories.make_customer(name=f"Customer {number}")
        user = factories.User.objects.create_user(f"user{number}")
        Member.objects.create(customer=customer, user=user)
        price = factories.make_price(factories.make_model(f"model {number}"))
        factories.make_usage(customer, price)
        node = factories.make_node(f"node-{number}")
        EvictionNotice.objects.create(
            node=node, epoch=1, source="aws", action="stop", fingerprint=str(number), signal_at=moment
        )
        Reroute.objects.create(node=node, epoch=1, signal_at=moment, flipped_at=moment)


@pytest.mark.parametrize("page", PAGES)
def test_lists_cost_the_same_number_of_queries_whatever_their_length(office, page):
    fill(range(2))
    office.get(url(page))  # content types and the like are cached by now
    with CaptureQueriesContext(
        connection,
    ) as few:
        text(office.get(url(page)))
    fill(range(2, 8))
    with CaptureQueriesContext(connection) as many:
        text(office.get(url(page)))
    assert len(many) == len(few)


def test_the_page_of_a_customer_costs_the_same_whatever_it_has(office):
    customer = factories.make_customer()

    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            text(office.get(url("customer", "change", customer.pk)))
        return len(captured)

    queries()
    factories.make_key(customer)
    customer.members.create(user=factories.User.objects.create_user("first"))
    few = queries()
    for number in range(5):
        factories.make_key(customer)
        customer.members.create(user=factories.User.objects.create_user(f"user{number}"))
    assert queries() == few
