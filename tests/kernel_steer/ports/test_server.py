"""Ports open, change and close as they are configured; and the gateway does that by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace

import pytest

from kernel_steer.gateway.server import Config, serve
from kernel_steer.ports import Backend, Endpoint, Mode, Timeouts
from tests.kernel_steer.harness import AdmissionDouble
from tests.kernel_steer.ports.stand import Client, HttpNode, Stand, until


def test_a_port_that_is_not_wanted_any_more_is_closed(stand: Stand):
    stand.http()
    client = stand.settled_client()
    assert client.ask() == "a"
    number = stand.server.number_of("port")
    stand.wait(stand.server.apply([]))
    assert client.is_at_end()
    with pytest.raises(ConnectionRefusedError):
        Client(("127.0.0.1", number))
    assert stand.stats.accepted == 1, "what was counted is kept"
    said = stand.server.health()
    assert (said["ports_open"], said["port_connections"], said["port_connections_open"]) == (0, 1, 0)


def test_a_port_that_cannot_be_opened_is_opened_later(stand: Stand, caplog):
    a = stand.node(HttpNode, "a")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = Endpoint("port", other.getsockname()[1], Mode.HTTP, a.backend)
        for _ in range(3):
            stand.wait(stand.server.apply([taken]))
    assert stand.server.names == frozenset()
    assert caplog.text.count("is not open") == 1
    stand.wait(stand.server.apply([taken]))
    assert stand.client().ask() == "a"


def test_a_change_of_mode_opens_it_anew(stand: Stand):
    a, b = stand.http()
    client = stand.settled_client()
    stand.open(Mode.TCP, a, b)
    assert client.is_at_end()
    assert stand.client().ask() == "a"


def test_a_node_that_never_answers_is_given_up(make_stand):
    stand = make_stand(timeouts=Timeouts(connect_s=0.2, linger_s=0.5, mend_s=0.02))
    with socket.socket() as deaf:
        # A queue that is full takes no more: the system says nothing to those who knock.
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(deaf.getsockname())
        b = stand.node(HttpNode, "b")
        primary = replace(b.backend, node=replace(b.key, name="deaf"), port=deaf.getsockname()[1])
        stand.wait(stand.server.apply([Endpoint("port", 0, Mode.HTTP, primary, b.backend)]))
        assert stand.client().ask() == "b"
        stand.wait(stand.server.apply([Endpoint("port", 0, Mode.HTTP, primary)]))
        client = stand.client()
        client.request("POST", "/", b"x")
        assert client.response()[0] == 503
        for caller in callers:
            caller.close()


def test_draining_ends_connections_between_two_requests(stand: Stand):
    a, _ = stand.http()
    idle, busy = stand.settled_client(), stand.settled_client()
    assert idle.ask() == "a"
    busy.request("GET", "/hold")
    busy.head()
    drained = asyncio.run_coroutine_threadsafe(stand.server.drain(10), stand.loop)
    assert idle.is_at_end()
    assert not drained.done()
    a.go_on.set()
    assert busy.exactly(200) == b"x" * 200
    assert busy.is_at_end()
    drained.result(10)


@pytest.mark.parametrize("engine", ["relay"])
async def test_the_gateway_opens_what_admission_says(tmp_path, valkey_server, engine: str):
    node = HttpNode("a")
    admission = AdmissionDouble([])
    admission.steered_ports = [
        Endpoint("x", _free_port(), Mode.HTTP, Backend(node.key, node.host, node.port))
    ]
    config = Config("127.0.0.1", 0, engine, tmp_path, valkey_server.url, b"k" * 32, drain_s=5)
    ready = asyncio.Event()
    serving = asyncio.create_task(serve(config, admission, ready=lambda _: ready.set()))
    try:
        await asyncio.wait_for(ready.wait(), 10)
        [endpoint] = admission.steered_ports
        assert await asyncio.to_thread(_ask, endpoint.port) == "a"
        admission.steered_ports = [replace(endpoint, port=_free_port())]
        assert await asyncio.to_thread(_ask, admission.steered_ports[0].port) == "a"
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 15)
        node.stop()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _ask(port: int) -> str:
    clients: list[Client] = []

    def connect() -> bool:
        try:
            clients.append(Client(("127.0.0.1", port)))
        except ConnectionRefusedError:
            return False
        return True

    until(connect, "the port is open")
    [client] = clients
    name = client.ask()
    client.sock.close()
    return name
