"""REST under /v1: who may call, what they see, and how refusals look."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.test import Client
from django.utils import timezone

from apex.api import base
from apex.api.rate_limit import Limit, take
from brokerage.models import APIKey, EvictionNotice, Node, PilotApplication, Reroute, ServedModel
from brokerage.services.customers import suspend_customer
from brokerage.services.keys import revoke_key
from tests.apex.conftest import make_usage

pytestmark = pytest.mark.django_db

PROBLEM_KEYS = {"type", "title", "status", "detail", "request_id"}


def assert_problem(answer, status: int, code: str) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    body = answer.json()
    assert set(body) >= PROBLEM_KEYS
    assert body["type"] == f"urn:apex:problem:{code}"
    assert body["status"] == status
    assert body["request_id"] == answer.headers["X-Request-ID"]
    return body


# --- keys ---


def test_a_key_lets_in(acme):
    answer = acme.api().get("/v1/usage")
    assert answer.status_code == 200
    assert answer.json() == {"next": None, "previous": None, "results": []}


@pytest.mark.parametrize(
    "header",
    ["Bearer apx_live_nonsense", "Bearer sk-1234", "Bearer", "Basic YTpi", "Bearer \x00", "apx_live_x"],
)
def test_malformed_keys(client, header):
    answer = client.get("/v1/usage", headers={"authorization": header})
    assert_problem(answer, 401, "unauthorized")
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="apex"'


def test_no_key(client):
    assert_problem(client.get("/v1/usage"), 401, "unauthorized")


def test_well_formed_but_unknown_key(acme, client):
    APIKey.objects.filter(pk=acme.key.pk).update(key_hash=b"\0" * 32)
    assert_problem(acme.api().get("/v1/usage"), 401, "unauthorized")


def test_revoked_key(acme):
    revoke_key(key=acme.key, actor=None)
    assert_problem(acme.api().get("/v1/usage"), 401, "unauthorized")


def test_expired_key(acme):
    APIKey.objects.filter(pk=acme.key.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
    assert_problem(acme.api().get("/v1/usage"), 401, "unauthorized")


def test_key_of_a_suspended_customer(acme):
    suspend_customer(customer=acme.customer, actor=acme.user)
    assert_problem(acme.api().get("/v1/usage"), 401, "unauthorized")


def test_portal_session_reads_and_needs_a_csrf_token_to_write(acme):
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(acme.user)
    assert browser.get("/v1/usage").status_code == 200
    answer = browser.post("/v1/api-keys", {"name": "x"}, content_type="application/json")
    assert_problem(answer, 403, "forbidden")


def test_person_without_a_team(client, django_user_model, redis_client):
    client.force_login(django_user_model.objects.create_user("loner"))
    assert "no team" in assert_problem(client.get("/v1/usage"), 403, "forbidden")["detail"]


# --- refusals ---


def test_everything_under_v1_is_a_problem(acme):
    api = acme.api()
    assert_problem(api.get("/v1/nowhere"), 404, "not-found")
    assert_problem(Client().get("/v1/nowhere"), 404, "not-found")
    assert_problem(api.put("/v1/usage"), 405, "method-not-allowed")
    assert_problem(api.get("/v1/usage?cursor=nonsense"), 404, "not-found")
    assert_problem(api.post("/v1/api-keys", "{", content_type="application/json"), 400, "bad-request")
    assert_problem(api.post("/v1/api-keys", "a=b", content_type="text/plain"), 415, "unsupported-media-type")


def test_body_over_the_limit(acme, settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    answer = acme.api().post("/v1/api-keys", {"name": "x" * 200}, content_type="application/json")
    assert_problem(answer, 413, "too-large")


def test_something_broken_tells_only_the_request_id(acme, monkeypatch):
    def explode(*_, **__):
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr("apex.api.views.usage.usage_of", explode)
    api = acme.api()
    api.raise_request_exception = False
    answer = api.get("/v1/usage")
    assert_problem(answer, 500, "internal-error")
    assert "hunter2" not in answer.text


def test_bad_input_names_the_field(acme):
    answer = acme.api().post("/v1/api-keys", {"name": "", "mode": "x"}, content_type="application/json")
    body = assert_problem(answer, 400, "invalid-input")
    assert {(e["pointer"], e["code"]) for e in body["errors"]} == {
        ("/name", "blank"),
        ("/mode", "invalid_choice"),
    }


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "limit=x", "from=yesterday", "to=2026-13-01"])
def test_bad_query_names_the_parameter(acme, query):
    body = assert_problem(acme.api().get(f"/v1/usage?{query}"), 400, "invalid-input")
    assert body["errors"][0]["pointer"] == "/" + query.split("=")[0]


def test_request_id_goes_round(acme):
    assert acme.api().get("/v1/usage", headers={"x-request-id": "abc-1"}).headers["X-Request-ID"] == "abc-1"
    made = acme.api().get("/v1/usage", headers={"x-request-id": "<script>"}).headers["X-Request-ID"]
    assert len(made) == 32


# --- limits ---


def test_every_answer_tells_what_is_left_and_the_last_is_refused(acme, monkeypatch):
    monkeypatch.setattr(base, "PER_CALLER", Limit("default", requests=2, window_s=3600))
    first, second, third = (acme.api().get("/v1/usage") for _ in range(3))
    assert first.headers["RateLimit-Policy"] == '"default";q=2;w=3600'
    assert first.headers["RateLimit"].startswith('"default";r=1;t=')
    assert second.headers["X-RateLimit-Remaining"] == "0"
    assert "Retry-After" not in first.headers
    assert_problem(third, 429, "rate-limited")
    assert 1 <= int(third.headers["Retry-After"]) <= 1800


def test_one_callers_limit_is_not_anothers(acme, other, monkeypatch):
    monkeypatch.setattr(base, "PER_CALLER", Limit("default", requests=1, window_s=3600))
    assert [acme.api().get("/v1/usage").status_code for _ in range(2)] == [200, 429]
    assert other.api().get("/v1/usage").status_code == 200


def test_bucket_refills_with_time(redis_client):
    limit = Limit("refill", requests=2, window_s=100)
    assert [take(limit, "x").allowed for _ in range(3)] == [True, True, False]
    # Half the window ago is one token.
    at_ms = int(redis_client.hget("apex:limit:refill:x", "at_ms"))
    redis_client.hset("apex:limit:refill:x", "at_ms", at_ms - 50_000)
    assert [take(limit, "x").allowed for _ in range(2)] == [True, False]


# --- resources ---


def test_usage_pages_hold_every_row_once(acme, other):
    rows = [make_usage(acme, minutes_ago=n) for n in range(1, 8)]
    make_usage(other)
    seen, address = [], "/v1/usage?limit=3"
    while address:
        page = acme.api().get(address).json()
        seen += [row["id"] for row in page["results"]]
        address = page["next"]
    assert seen == [str(row.pk) for row in rows]


def test_usage_row(acme):
    row = make_usage(acme, amount="0.000033000", journal_id=1, charged_at=timezone.now())
    [shown] = acme.api().get("/v1/usage").json()["results"]
    assert shown["id"] == str(row.pk)
    assert shown["model"] == "gemma-test"
    assert shown["amount"] == {"amount": "0.000033000", "currency": "USD"}


def test_usage_of_a_period(acme):
    now = datetime.now(UTC)
    for minutes in (10, 20, 30):
        make_usage(acme, minutes_ago=minutes)
    since, until = (now - timedelta(minutes=m) for m in (25, 15))
    query = {"from": since.isoformat(), "to": until.isoformat().replace("+00:00", "Z")}
    assert len(acme.api().get("/v1/usage", query).json()["results"]) == 1


def test_models_show_price_and_readiness(acme):
    make_usage(acme)
    model = ServedModel.objects.get()
    Node.objects.create(name="n1", served_model=model, state=Node.State.READY)
    Node.objects.create(name="n2", served_model=model, state=Node.State.GONE)
    [shown] = acme.api().get("/v1/models").json()["results"]
    assert shown == {
        "id": "gemma-test",
        "description": "",
        "context_tokens": 2048,
        "ready_nodes": 1,
        "price_per_million_tokens": {
            "prompt": {"amount": "0.250000000", "currency": "USD"},
            "completion": {"amount": "1.000000000", "currency": "USD"},
        },
    }


def test_key_is_shown_once_and_works(acme):
    answer = acme.api().post("/v1/api-keys", {"name": "ci"}, content_type="application/json")
    assert answer.status_code == 201
    secret = answer.json()["key"]
    assert Client(headers={"authorization": f"Bearer {secret}"}).get("/v1/usage").status_code == 200
    listed = acme.api().get("/v1/api-keys")
    assert {key["name"] for key in listed.json()["results"]} == {"ci", "Acme's key"}
    assert secret not in listed.text
    assert "key_hash" not in listed.text


def test_revoking_twice_is_the_same_as_once(acme):
    made = acme.api().post("/v1/api-keys", {"name": "ci"}, content_type="application/json").json()
    assert acme.api().delete(f"/v1/api-keys/{made['id']}").status_code == 204
    assert acme.api().delete(f"/v1/api-keys/{made['id']}").status_code == 204
    assert_problem(
        Client(headers={"authorization": f"Bearer {made['key']}"}).get("/v1/usage"), 401, "unauthorized"
    )


def test_evictions(acme):
    make_usage(acme)
    node = Node.objects.create(name="n1", served_model=ServedModel.objects.get())
    at = datetime(2026, 12, 1, 12, tzinfo=UTC)
    Reroute.objects.create(
        node=node,
        epoch=1,
        signal_at=at,
        flipped_at=at,
        first_byte_at=at + timedelta(microseconds=2500),
        flows=3,
    )
    assert EvictionNotice.objects.count() == 0
    [shown] = acme.api().get("/v1/evictions").json()["results"]
    assert (shown["node"], shown["reroute_ms"], shown["flows"]) == ("n1", 2.5, 3)


def test_pilot_application_is_public_and_tells_nobody_who_applied(client, redis_client):
    application = {"name": "Ada", "email": "ada@example.com", "company": "Engines", "use_case": "Proofs"}
    answers = [
        client.post("/v1/pilot-applications", application, content_type="application/json") for _ in range(2)
    ]
    assert [a.status_code for a in answers] == [202, 202]
    assert answers[0].json() == answers[1].json() == {"status": "received"}
    assert PilotApplication.objects.count() == 1
    bad = client.post("/v1/pilot-applications", application | {"email": "x"}, content_type="application/json")
    assert assert_problem(bad, 400, "invalid-input")["errors"][0]["pointer"] == "/email"


def test_documentation_is_served_from_here(client):
    page = client.get("/v1/docs")
    assert page.status_code == 200
    assert "http://" not in page.text
    assert (
        "'unsafe-inline'" not in page.headers["Content-Security-Policy"].split("script-src")[1].split(";")[0]
    )
    assert client.get("/v1/openapi.json").json()["openapi"] == "3.1.1"
