"""Busy ports: the next free one, or one clear line when the port was asked for by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from apex.local.ports import Ports, PortTaken


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_the_usual_port_when_it_is_free(free_port):
    assert Ports({}).choose("APEX_WEB_PORT", free_port) == free_port


def test_the_port_that_was_asked_for(free_port):
    assert Ports({"APEX_WEB_PORT": str(free_port)}).choose("APEX_WEB_PORT", 8000) == free_port


def test_the_next_free_one_when_the_usual_one_is_taken(taken_port):
    chosen = Ports({}).choose("APEX_WEB_PORT", taken_port)
    assert taken_port < chosen < taken_port + 200
    socket.create_server(("127.0.0.1", chosen)).close()


def test_no_port_is_handed_out_twice(free_port):
    ports = Ports({})
    assert len({ports.choose("APEX_WEB_PORT", free_port), ports.choose("APEX_GATEWAY_PORT", free_port)}) == 2


def test_a_taken_port_that_was_asked_for_is_told_with_who_has_it(taken_port):
    with pytest.raises(PortTaken) as caught:
        Ports({"APEX_WEB_PORT": str(taken_port)}).choose("APEX_WEB_PORT", 8000)
    assert str(caught.value).startswith(f"APEX_WEB_PORT={taken_port} is taken by ")
    assert f"(pid {os.getpid()}): end that, or choose another port" in str(caught.value)


def test_a_holder_we_may_not_know_comes_with_the_command_that_tells(taken_port, monkeypatch):
    monkeypatch.setattr("apex.local.ports.psutil.net_connections", lambda kind: [])
    with pytest.raises(PortTaken, match=f"ask: ss -ltnp 'sport = :{taken_port}'"):
        Ports({"APEX_WEB_PORT": str(taken_port)}).choose("APEX_WEB_PORT", 8000)


def test_a_port_of_which_only_old_connections_remain_is_free(free_port):
    with socket.create_server(("127.0.0.1", free_port)) as server:
        client = socket.create_connection(("127.0.0.1", free_port))
        accepted, _ = server.accept()
        accepted.close()  # the server's side closes first and keeps the port in TIME_WAIT
        client.close()
    assert Ports({"APEX_WEB_PORT": str(free_port)}).choose("APEX_WEB_PORT", 8000) == free_port


def test_a_malformed_port_ends_with_the_configuration_status(capsys):
    with pytest.raises(SystemExit) as caught:
        Ports({"APEX_WEB_PORT": "web"}).choose("APEX_WEB_PORT", 8000)
    assert caught.value.code == 78
    assert capsys.readouterr().err == "apex: configuration: APEX_WEB_PORT must be a whole number\n"
