"""Third parties' APIs from the back office to the gateway: tried, stored sealed, used, taken out of use."""

import html
import re

import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.urls import reverse

from brokerage.admission import BrokerageAdmission
from brokerage.models import Node, ServedModel, Upstream
from brokerage.services import nodes, ports, upstreams
from brokerage.services.nodes import Heartbeat
from brokerage.services.secrets import SecretUnreadable, seal, unseal
from brokerage.services.upstreams import UpstreamSettings
from kernel_steer.admission import Resume
from ledger.models import AuditEvent
from tests.brokerage import factories
from tests.brokerage.broker import World, eventually, orm
from tests.kernel_steer.https_double import KEY, Authority, HttpsDouble

ADD = "admin:brokerage_upstream_add"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def api(authority, tmp_path, settings):
    settings.UPSTREAM_PRIVATE_NETWORKS = ["127.0.0.0/8"]
    with HttpsDouble(authority.context(tmp_path)).in_a_thread() as double:
        yield double


@pytest.fixture
def office(client, db):
    client.force_login(factories.make_staff())
    return client


def add(name: str = "acme", model: ServedModel | None = None, **changes: object) -> Upstream:
    wanted = {
        "base_url": "https://api.example.com/openai/v1",
        "model": "acme/big-8b",
        "api_key": KEY,
    } | changes
    return upstreams.add_upstream(
        name=name,
        served_model=model or factories.make_model(),
        provider="acme",
        wanted=UpstreamSettings(**wanted),
        actor="test",
    )


# --- the form ----------------------------------------------------------------------------------------------


def typed(api: HttpsDouble, authority: Authority, **changes: object) -> dict[str, object]:
    return {
        "name": "acme",
        "served_model": factories.make_model().pk,
        "provider": "acme",
        "base_url": f"https://127.0.0.1:{api.port}/openai/v1/",
        "model": "acme/big-8b",
        "api_key": KEY,
        "resume": "none",
        "slots": "32",
        "hourly_rate": "1.5",
        "ca_pem": authority.pem,
    } | changes


def errors(response) -> dict[str, list[str]]:
    return response.context["adminform"].form.errors


def test_an_api_is_asked_before_it_is_stored_and_its_key_is_never_shown(office, api, authority):
    page = office.post(reverse(ADD), typed(api, authority), follow=True)
    assert page.redirect_chain, errors(page)
    assert [asked.headers["authorization"] for asked in api.asked] == [f"Bearer {KEY}"]
    node = Node.objects.get()
    assert (node.state, node.slots, node.capabilities, node.last_seen_at) == ("ready", 32, ["none"], None)
    change = office.get(reverse("admin:brokerage_upstream_change", args=[node.pk]))
    shown = page.content + change.content + office.get(reverse("admin:brokerage_node_changelist")).content
    assert KEY.encode() not in shown
    assert f"ends with {KEY[-4:]}" in html.unescape(change.content.decode())
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM brokerage_upstream")
        assert KEY not in str(cursor.fetchall())
    assert KEY not in str(list(AuditEvent.objects.values()))


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"base_url": "http://api.example.com/v1"}, "base_url", "https://"),
        ({"base_url": "https://me:secret@api.example.com/v1"}, "base_url", "the key has its field"),
        ({"base_url": "https://api.example.com/v1/chat/completions"}, "base_url", "before /chat/completions"),
        ({"base_url": "https://169.254.169.254/v1"}, "base_url", "metadata service"),
        ({"base_url": "https://10.0.0.1/v1"}, "base_url", "not a public address"),
        ({"ca_pem": "no pem"}, "ca_pem", "no certificate"),
        ({"ca_pem": ""}, "base_url", "certificate is not accepted"),
        ({"api_key": "sk two words"}, "api_key", "no blanks"),
        ({"slots": "0"}, "slots", "greater than or equal to 1"),
    ],
)
def test_what_is_wrong_is_said_beside_its_field(office, api, authority, changes, field, says):
    page = office.post(reverse(ADD), typed(api, authority, **changes))
    assert [*errors(page)] == [field]
    assert says in str(errors(page)[field])
    assert KEY.encode() not in page.content
    assert not Node.objects.exists()


@pytest.mark.parametrize(
    ("status", "field"), [(401, "api_key"), (404, "model"), (400, "model"), (500, "base_url")]
)
def test_what_the_api_does_not_take_is_said_beside_its_field(office, api, authority, status, field):
    api.status, api.error = status, {"message": f"Incorrect: {KEY}"}
    page = office.post(reverse(ADD), typed(api, authority))
    assert [*errors(page)] == [field]
    assert KEY not in page.content.decode()
    assert not Node.objects.exists()


def test_one_that_does_not_answer_yet_can_be_stored_without_a_test(office, api, authority):
    api.status = 500
    assert office.post(reverse(ADD), typed(api, authority) | {"_untested": "1"}).status_code == 302
    assert api.asked == []
    node = Node.objects.get()
    page = office.post(
        reverse("admin:brokerage_upstream_changelist"),
        {"action": "test_connection", "_selected_action": [node.pk]},
        follow=True,
    )
    assert "the node answered 500" in re.sub(r"<[^>]+>", "", html.unescape(page.content.decode()))


def test_a_change_keeps_the_key_and_puts_the_node_into_use_again(office, api, authority):
    office.post(reverse(ADD), typed(api, authority))
    node = Node.objects.get()
    nodes.mark_draining(node=node, epoch=node.epoch, reason="out of use")
    change = typed(api, authority, model="acme/big-9b", api_key="", slots="5")
    answer = office.post(reverse("admin:brokerage_upstream_change", args=[node.pk]), change)
    assert answer.status_code == 302, errors(answer)
    assert [asked.headers["authorization"] for asked in api.asked] == [f"Bearer {KEY}"] * 2
    stored = Upstream.objects.get()
    assert (stored.model, unseal(stored.sealed_key)) == ("acme/big-9b", KEY)
    again = Node.objects.get()
    assert (again.state, again.slots) == ("ready", 5)
    assert again.epoch > node.epoch
    change["remove_key"] = "on"
    office.post(reverse("admin:brokerage_upstream_change", args=[node.pk]), change)
    assert "authorization" not in api.asked[-1].headers
    assert Upstream.objects.get().sealed_key == ""


# --- the rules ---------------------------------------------------------------------------------------------


def test_a_pool_has_nodes_of_one_kind(db):
    add(resume="text")
    add("second", resume="text")
    with pytest.raises(ValidationError, match="another name"):
        add("third", resume="none")
    ours = factories.make_model("ours")
    ServedModel.objects.filter(pk=ours.pk).update(capabilities=["guided", "ids"])
    with pytest.raises(ValidationError, match="another name"):
        add("fourth", model=ours)


def test_no_worker_may_speak_for_it_and_no_port_leads_to_it(db):
    upstream = add()
    with pytest.raises(nodes.UnknownNode):
        nodes.record_heartbeat(heartbeat=Heartbeat("acme", 1, "10.0.0.1", 80, "gemma", "", 1, True))
    customer = factories.make_customer()
    port = ports.open_port(
        customer=customer,
        name="mine",
        number=21000,
        mode="tcp",
        served_model=upstream.node.served_model,
        actor="test",
    )
    assert port.primary is None
    assert nodes.sweep_lost_nodes() == 0
    assert Node.objects.get().state == "ready"


def test_secrets_are_opened_by_the_secret_key_and_its_fallbacks_alone(settings):
    sealed = seal("secret")
    assert "secret" not in sealed
    old, settings.SECRET_KEY = settings.SECRET_KEY, "another key " * 5
    with pytest.raises(SecretUnreadable):
        unseal(sealed)
    settings.SECRET_KEY_FALLBACKS = [old]
    assert unseal(sealed) == "secret"


# --- the gateway -------------------------------------------------------------------------------------------


async def test_a_gateway_uses_it_with_its_key_until_that_is_not_taken(world: World):
    upstream = await orm(lambda: add(model=factories.make_model("foreign"), resume="text"))
    gateways = [BrokerageAdmission(), BrokerageAdmission()]
    for gateway in gateways:
        await gateway.start()
    try:
        node = gateways[0].choose_node("foreign")
        assert node is not None
        assert node.upstream is not None
        assert (node.host, node.port, node.resume) == ("api.example.com", 443, Resume.TEXT)
        assert (node.upstream.api_key, node.upstream.base_path) == (KEY, "/openai/v1")
        assert KEY not in repr(node)
        gateways[0].node_misconfigured(node.name, node.epoch, "the API does not take our key: status 401")
        assert gateways[0].choose_node("foreign") is None

        async def everybody_knows() -> bool:
            return gateways[1].choose_node("foreign") is None

        await eventually(everybody_knows, timeout_s=30)
        told = await orm(lambda: Node.objects.get(name="acme"))
        assert (told.state, "401" in told.state_reason) == ("gone", True)
        wanted = UpstreamSettings("https://api.example.com/v1", "big", "sk-another-key-000001", resume="text")
        await orm(lambda: upstreams.change_upstream(upstream=upstream, wanted=wanted, actor="test"))

        async def in_use_again() -> bool:
            return all(gateway.choose_node("foreign") is not None for gateway in gateways)

        await eventually(in_use_again, timeout_s=30)
    finally:
        for gateway in gateways:
            await gateway.stop()
