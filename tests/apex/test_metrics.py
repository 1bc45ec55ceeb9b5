"""What a scrape of /metrics finds, and that nothing makes it fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from prometheus_client.parser import text_string_to_metric_families

from apex import metrics
from brokerage.models import EvictionNotice, Node, Reroute, ServedModel
from kernel_steer.signals import GatewayAddress, GatewayReport, register, unregister
from kernel_steer.signals.report import report_key
from tests.apex.conftest import make_team, make_usage
from tests.apex.test_health import Loopback
from tests.brokerage.factories import give_credit, open_hold

SIGNAL_AT = datetime(2026, 12, 1, 10, tzinfo=UTC)
GATEWAY_SAYS = {
    "status": "ok", "engine": "relay", "answers_open": 3, "flows_open": 4, "flows_total": 17, "flips": 2,
    "bytes_forwarded": 123_456, "signals_refused": 1, "ports_open": 2, "port_moves": 5,
}  # fmt: skip


@pytest.fixture
def gateway(settings) -> Iterator[Loopback]:
    service = Loopback()
    service.answers["/healthz"] = (200, GATEWAY_SAYS)
    settings.GATEWAY_PUBLIC_URL = service.url
    yield service
    service.stop()


def scrape(client) -> dict[tuple[str, str], float]:
    """(name, label values joined) -> value, as Prometheus reads it."""
    response = client.get("/metrics")
    assert response.status_code == 200
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name, ",".join(sample.labels.values())] = sample.value
    return found


def make_node(name: str = "node-a", **fields) -> Node:
    model, _ = ServedModel.objects.get_or_create(name="gemma", defaults={"context_tokens": 2048})
    return Node.objects.create(name=name, served_model=model, **fields)


def make_reroute(node: Node, epoch: int, *offsets_ms: float) -> None:
    moments = [SIGNAL_AT + timedelta(milliseconds=offset) for offset in offsets_ms]
    flipped_at, first_byte_at = [*moments, None, None][:2]
    Reroute.objects.create(
        node=node, epoch=epoch, signal_at=SIGNAL_AT, flipped_at=flipped_at, first_byte_at=first_byte_at
    )


@pytest.mark.django_db
def test_nodes_notices_and_reroutes(client, gateway):
    node = make_node(state="ready")
    make_node("node-b", state="gone")
    for number, source in enumerate(("aws", "aws", "gcp")):
        EvictionNotice.objects.create(
            node=node,
            epoch=number,
            source=source,
            action="stop",
            fingerprint=str(number),
            signal_at=SIGNAL_AT,
        )
    make_reroute(node, 1, 0.25, 30)
    make_reroute(node, 2, 0.5)
    make_reroute(node, 3, 20_000, 20_500)
    make_reroute(node, 4)
    found = scrape(client)
    assert (found["apex_nodes", "ready"], found["apex_nodes", "gone"]) == (1, 1)
    assert found["apex_eviction_notices_total", "stop,aws"] == 2
    assert found["apex_reroutes_total", ""] == 4
    flip = "apex_reroute_flip_seconds"
    assert [found[f"{flip}_bucket", bound] for bound in ("0.0001", "0.0002", "0.0005", "10.0", "+Inf")] == [
        0, 0, 2, 2, 3,
    ]  # fmt: skip
    assert (found[f"{flip}_count", ""], found[f"{flip}_sum", ""]) == (3, pytest.approx(20.00075))
    assert found["apex_reroute_first_byte_seconds_bucket", "0.05"] == 1
    assert found["apex_reroute_first_byte_seconds_count", ""] == 2


@pytest.mark.django_db
def test_usage_and_holds(client, gateway):
    team = make_team("Acme")
    make_usage(team)
    give_credit(team.customer, "5")
    open_hold(team.customer, "1", key="first")
    before = scrape(client)
    assert before["apex_usage_uncharged", ""] + before["apex_usage_charged_total", ""] == 1
    assert before["apex_holds_open", ""] == 1
    team.customer.usage.update(charged_at=SIGNAL_AT, amount=0, journal_id=None)
    after = scrape(client)
    assert (after["apex_usage_uncharged", ""], after["apex_usage_charged_total", ""]) == (0, 1)


@pytest.mark.django_db
def test_the_gateway_is_passed_on(client, gateway):
    found = scrape(client)
    assert found["apex_gateway_up", ""] == 1
    assert found["apex_gateway_info", "relay"] == 1
    assert found["apex_gateway_draining", ""] == 0
    assert found["apex_gateway_answers_open", ""] == 3
    assert found["apex_gateway_flows_total", ""] == 17
    assert found["apex_gateway_flips_total", ""] == 2
    assert found["apex_gateway_forwarded_bytes_total", ""] == 123_456
    assert found["apex_gateway_signals_refused_total", ""] == 1
    assert (found["apex_gateway_ports_open", ""], found["apex_gateway_port_moves_total", ""]) == (2, 5)


@pytest.mark.django_db
def test_what_the_gateway_does_not_say_is_not_claimed(client, gateway):
    gateway.answers["/healthz"] = (200, {"status": "draining", "flips": "many", "answers_open": True})
    found = scrape(client)
    assert (found["apex_gateway_up", ""], found["apex_gateway_draining", ""]) == (1, 1)
    assert not {name for name, _ in found} & {
        "apex_gateway_flips_total", "apex_gateway_answers_open", "apex_gateway_forwarded_bytes_total",
    }  # fmt: skip


@pytest.mark.django_db
@pytest.mark.parametrize("answer", [(500, {}), (200, ["no", "object"]), (200, {}), None])
def test_a_gateway_that_is_not_there_does_not_fail_the_scrape(client, gateway, answer):
    make_node(state="ready")
    if answer is None:
        gateway.stop()
    else:
        gateway.answers["/healthz"] = answer
    found = scrape(client)
    assert found["apex_gateway_up", ""] == 0
    assert found["apex_nodes", "ready"] == 1


@pytest.mark.django_db
def test_a_scrape_takes_the_same_number_of_queries_however_much_there_is(client, gateway):
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            scrape(client)
        return len(captured)

    few = queries()
    for number in range(5):
        node = make_node(f"node-{number}", state="ready")
        make_reroute(node, 1, 1, 2)
        EvictionNotice.objects.create(
            node=node, epoch=1, source=f"source-{number}", action="stop", fingerprint=str(number),
            signal_at=SIGNAL_AT,
        )  # fmt: skip
    assert queries() == few


def test_a_table_that_cannot_be_read_in_time_costs_only_its_own_figures(
    client, gateway, fresh_database, monkeypatch
):
    """Another session holds the lock that the reroutes are behind."""
    monkeypatch.setattr(metrics, "_QUERY_MS", 100)
    make_node(state="ready")
    parameters = connection.get_connection_params()
    address = {key: parameters[key] for key in ("dbname", "host", "port", "user") if key in parameters}
    with psycopg.connect(**address) as other:
        other.execute("LOCK TABLE reroute IN ACCESS EXCLUSIVE MODE")
        found = scrape(client)
    assert found["apex_metrics_read", "reroutes"] == 0
    assert found["apex_metrics_read", "nodes"] == found["apex_metrics_read", "holds"] == 1
    assert "apex_reroutes_total" not in {name for name, _ in found}
    assert scrape(client)["apex_metrics_read", "reroutes"] == 1


def test_without_a_database_the_gateway_is_still_told(client, gateway, fresh_database, monkeypatch):
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "NAME", "gone")
    found = scrape(client)
    assert {value for (name, _), value in found.items() if name == "apex_metrics_read"} == {0}
    assert found["apex_gateway_up", ""] == 1
    assert "apex_nodes" not in {name for name, _ in found}


# --- signals ------------------------------------------------------------------------------------------------


def report(**changes) -> GatewayReport:
    counted = GatewayReport(
        engine="kernel", heard={"datagram": 3, "stream": 4}, first={"datagram": 3, "stream": 1}, duplicates=3,
        flips=3, flips_found=2, restores=1, refused=[("forged", "datagram", 7)],
    )  # fmt: skip
    return replace(counted, **changes)


@pytest.fixture
def registered(valkey_server, redis_client, settings):
    """Two gateways that keep their reports in Redis."""
    settings.REDIS_URL = valkey_server.url
    register(redis_client, GatewayAddress("one", "127.0.0.1", 1), report())
    register(redis_client, GatewayAddress("two", "127.0.0.1", 2), report(engine="relay", flips_found=0))
    return redis_client


@pytest.mark.django_db
def test_one_scrape_sees_the_signals_of_every_gateway(client, gateway, registered):
    found = scrape(client)
    assert (found["apex_steer_gateways", "kernel"], found["apex_steer_gateways", "relay"]) == (1, 1)
    assert found["apex_steer_signals_heard_total", "stream,one"] == 4
    assert found["apex_steer_signals_first_total", "datagram,two"] == 3
    assert found["apex_steer_signals_duplicate_total", "one"] == 3
    assert found["apex_steer_signals_refused_total", "datagram,one,forged"] == 7
    assert found["apex_steer_flips_total", "two"] == 3
    assert (found["apex_steer_flips_found_total", "one"], found["apex_steer_flips_found_total", "two"]) == (
        2,
        0,
    )
    assert found["apex_steer_restores_total", "one"] == 1


@pytest.mark.django_db
def test_a_gateway_that_ended_or_talks_nonsense_is_left_out(client, gateway, registered):
    unregister(registered, "one")
    registered.set(report_key("two"), b'{"engine": "relay", "heard": 5}')
    found = scrape(client)
    assert found["apex_steer_read", ""] == 1
    assert not [name for name, _ in found if name.startswith("apex_steer_signals")]


@pytest.mark.django_db
def test_without_redis_the_scrape_goes_on(client, gateway, settings, tmp_path):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody"
    found = scrape(client)
    assert found["apex_steer_read", ""] == 0
    assert found["apex_gateway_up", ""] == 1
