"""The bench measures what it says, and would see a fault."""

from __future__ import annotations

import socket

import pytest

from kernel_steer.measure import api, ports
from kernel_steer.measure.api import _compare
from kernel_steer.measure.backend import answer
from kernel_steer.measure.load import Load
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
@pytest.mark.parametrize("measure", [api.measure, ports.measure], ids=["api", "ports"])
def test_a_small_measurement(valkey_server, redis_client, engine, measure):
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


# --- the live connections of a steered port -------------------------------------------------------------------


class Scripted:
    """A door that sends what the test says."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.load = Load(self._listener.getsockname()[1], 1)
        self._far, _ = self._listener.accept()
        self.load._ask_next()
        head = self._far.recv(1000)
        self.path = head.split()[1].decode()

    def send(self, data: bytes) -> None:
        self._far.sendall(data)
        while self.load._poll.poll(0.2):
            self.load._read(0)

    def end(self) -> None:
        self._far.close()
        self._listener.close()


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr("kernel_steer.measure.load._LAST_ANSWERS_S", 0.01)
    door = Scripted()
    yield door
    door.end()


def counted(load: Load) -> tuple[int, int, int]:
    seen = load.finish()
    return seen.resets, seen.bytes_lost, seen.bytes_duplicated


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_whole_answer_is_well(scripted, node):
    scripted.send(answer(node, scripted.path))
    assert counted(scripted.load) == (0, 0, 0)


def test_a_missing_byte_is_seen(scripted):
    scripted.send(answer("a", scripted.path)[:-1])
    assert counted(scripted.load) == (0, 1, 0)


def test_an_answer_that_came_twice_is_seen(scripted):
    whole = answer("a", scripted.path)
    scripted.send(whole)
    scripted.send(whole)
    assert counted(scripted.load) == (0, 0, len(whole))


def test_an_answer_put_together_from_two_nodes_is_seen(scripted):
    half = len(answer("a", scripted.path)) // 2
    scripted.send(answer("a", scripted.path)[:half] + answer("b", scripted.path)[half:])
    assert counted(scripted.load)[1] > 0


def test_a_connection_that_ends_is_seen(scripted):
    scripted._far.shutdown(socket.SHUT_WR)
    scripted.load._read(1)
    assert counted(scripted.load)[0] == 1
