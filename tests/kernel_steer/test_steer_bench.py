"""The bench measures what it says, and would see a fault."""

from __future__ import annotations

import pytest

from kernel_steer.measure.api import _compare, measure
from kernel_steer.measure.machine import own_database
from kernel_steer.measure.node import event, role_chunk

BODY = [role_chunk(), *(event(position) for position in range(5))]


def test_a_whole_body_and_any_beginning_of_it_are_well():
    assert _compare(b"".join(BODY)) == (0, 0)
    assert _compare(b"".join(BODY)[:-7]) == (0, 0)
    assert _compare(BODY[0]) == (0, 0)


def test_a_missing_event_is_seen():
    assert _compare(b"".join(BODY[:3] + BODY[4:])) == (len(event(2)), 0)


def test_an_event_that_came_twice_is_seen():
    assert _compare(b"".join([*BODY[:3], BODY[2], *BODY[3:]])) == (0, len(event(1)))


@pytest.mark.parametrize("engine", ["relay", "auto"])
def test_a_small_measurement(valkey_server, redis_client, engine):
    result = measure(engine=engine, flows=10, flips=4, redis_url=valkey_server.url)
    figures = result.as_json()
    assert (figures["flows"], figures["flips"]) == (10, 4)
    assert (figures["client_resets"], figures["bytes_lost"], figures["bytes_duplicated"]) == (0, 0, 0)
    assert len(result.reroute_ms) == 4
    assert min(result.reroute_ms) > 0
    assert len(result.flip_us) == 4


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("unix:///run/v.sock", "unix:///run/v.sock?db=15"),
        ("unix:///run/v.sock?db=2", "unix:///run/v.sock?db=15"),
        ("redis://h:6379/3", "redis://h:6379/15"),
        ("rediss://u:p@h:6380?ssl_cert_reqs=required", "rediss://u:p@h:6380/15?ssl_cert_reqs=required"),
    ],
)
def test_the_platforms_own_gateways_hear_nothing_of_it(url, own):
    assert own_database(url) == own
