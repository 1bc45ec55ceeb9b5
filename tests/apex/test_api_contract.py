"""The API is what its OpenAPI document says: the file in docs is current, and answers fit it."""

from __future__ import annotations

from pathlib import Path

import pytest
import schemathesis
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from apex.api import base
from apex.api.rate_limit import Limit
from tests.apex.conftest import make_team, make_usage
from tests.apex.test_api_money import Provider

DOCUMENT = Path(__file__).parents[2] / "docs/openapi.yaml"
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


def test_document_in_docs_is_current(tmp_path):
    """After a change: `python manage.py spectacular --file docs/openapi.yaml`."""
    fresh = tmp_path / "openapi.yaml"
    call_command("spectacular", "--validate", "--fail-on-warn", "--file", str(fresh))
    assert DOCUMENT.read_text() == fresh.read_text()


def test_money_is_never_a_number(client):
    document = client.get("/v1/openapi.json").json()
    assert document["components"]["schemas"]["Money"]["properties"]["amount"]["type"] == "string"
    for name, schema in document["components"]["schemas"].items():
        for field, kind in schema.get("properties", {}).items():
            assert kind.get("type") != "number" or field in {"latency_ms", "reroute_ms"}, (name, field)


def test_every_operation_documents_its_refusals(client):
    paths = client.get("/v1/openapi.json").json()["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            if operation["operationId"] == "health_matrix":
                continue
            expected = {"400", "429"}
            if operation.get("security") != [{}] and path != "/v1/pilot-applications":
                expected |= {"401", "403"}
            assert expected <= set(operation["responses"]), (method, path)


@pytest.fixture
def schema(fresh_database, redis_client, monkeypatch):
    """The live document with a key in each request, and no limit in the way."""
    generous = Limit("default", requests=100_000, window_s=60)
    monkeypatch.setattr(base, "PER_CALLER", generous)
    monkeypatch.setattr(base, "PER_ADDRESS", generous)
    provider = Provider()
    monkeypatch.setattr("ledger.paypal.orders.gateway", lambda rail: provider)
    team = make_team("Acme")
    make_usage(team)
    loaded = schemathesis.openapi.from_wsgi("/v1/openapi.json", get_wsgi_application())
    # The matrix waits for parts that do not run here; test_health has it.
    loaded = loaded.exclude(operation_id="health_matrix")
    return loaded, {"Authorization": f"Bearer {team.secret}"}


def test_answers_fit_the_document(schema):
    loaded, headers = schema
    seen = {}
    for result in loaded.get_all_operations():
        operation = result.ok()
        seen[operation.definition.raw["operationId"]] = statuses_that_fit(operation, headers)
    # Both good and bad requests were among them, so the document was really put to the test.
    assert len(seen) >= 14
    assert {200} <= seen["list_usage"]
    assert {201, 400} <= seen["create_api_key"]
    assert {201, 400} <= seen["create_topup"]


def statuses_that_fit(operation, headers: dict[str, str]) -> set[int]:
    """The same few requests in every run; each answer has to be a documented one."""
    statuses = set()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def fits(case):
        statuses.add(case.call_and_validate(headers=headers, checks=CHECKS).status_code)

    fits()
    return statuses
