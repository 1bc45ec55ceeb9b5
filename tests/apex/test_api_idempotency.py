"""A POST with an Idempotency-Key happens once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from apex.api.idempotency import forget_old_requests
from apex.models import IdempotentRequest
from brokerage.models import APIKey
from tests.apex.conftest import Team, make_team


def make_key(team: Team, key: str, name: str = "ci", **headers: str):
    client = team.api()
    client.raise_request_exception = False
    return client.post(
        "/v1/api-keys",
        {"name": name},
        content_type="application/json",
        headers={"idempotency-key": key} | headers,
    )


def made(team: Team) -> int:
    return APIKey.objects.filter(customer=team.customer).exclude(pk=team.key.pk).count()


@pytest.mark.django_db
class TestRules:
    def test_second_time_replays_the_first_answer(self, acme):
        first, second = make_key(acme, "k1"), make_key(acme, '"k1"')
        assert (first.status_code, second.status_code) == (201, 201)
        assert "Idempotent-Replayed" not in first.headers
        assert second.headers["Idempotent-Replayed"] == "true"
        assert second.json() == first.json() | {"key": None}
        assert made(acme) == 1

    def test_the_secret_is_stored_nowhere(self, acme):
        secret = make_key(acme, "k1").json()["key"]
        assert secret not in str(list(IdempotentRequest.objects.values()))

    def test_another_request_under_the_same_key_is_refused(self, acme):
        make_key(acme, "k1")
        answer = make_key(acme, "k1", name="other")
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:apex:problem:idempotency-key-reused")
        assert made(acme) == 1

    def test_callers_do_not_share_keys(self, acme, other):
        assert make_key(acme, "k1").json()["id"] != make_key(other, "k1").json()["id"]

    def test_a_refused_request_can_be_corrected_under_the_same_key(self, acme):
        assert make_key(acme, "k1", name="").status_code == 400
        assert make_key(acme, "k1", name="ci").status_code == 201

    def test_a_broken_request_leaves_nothing_and_can_be_repeated(self, acme, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr("apex.api.views.keys.APIKeySerializer.data", property(lambda _: 1 / 0))
            assert make_key(acme, "k1").status_code == 500
        assert (made(acme), IdempotentRequest.objects.count()) == (0, 0)
        assert make_key(acme, "k1").status_code == 201

    def test_one_at_work_is_told_so(self, acme):
        make_key(acme, "k1")
        IdempotentRequest.objects.update(status=None, response=None)
        answer = make_key(acme, "k1")
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:apex:problem:idempotency-in-flight")
        assert answer.headers["Retry-After"] == "1"

    def test_one_whose_process_died_is_taken_over(self, acme):
        make_key(acme, "k1")
        long_ago = timezone.now() - timedelta(minutes=2)
        IdempotentRequest.objects.update(status=None, response=None, locked_at=long_ago)
        assert make_key(acme, "k1").status_code == 201

    @pytest.mark.parametrize("key", ["", '""', "x" * 256, "snow\u2603".encode().decode("latin1")])
    def test_malformed_keys(self, acme, key):
        answer = make_key(acme, key)
        assert (answer.status_code, answer.json()["type"]) == (
            400,
            "urn:apex:problem:idempotency-key-malformed",
        )

    def test_yesterdays_keys_are_forgotten(self, acme):
        make_key(acme, "old")
        IdempotentRequest.objects.update(created_at=timezone.now() - timedelta(hours=25))
        make_key(acme, "new")
        assert forget_old_requests() == 1
        assert [row.key for row in IdempotentRequest.objects.all()] == ["new"]


def test_many_at_once_happen_once(fresh_database, redis_client):
    team = make_team("Crowd")

    def send(_: int):
        try:
            return make_key(team, "k1")
        finally:
            connection.close()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(24)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    first = [
        answer
        for answer in answers
        if answer.status_code == 201 and "Idempotent-Replayed" not in answer.headers
    ]
    assert len(first) == 1
    assert made(team) == 1
