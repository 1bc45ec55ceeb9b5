"""A node on the gateway's own host flips itself in the kernel, whatever the gateway is doing."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from django.conf import settings

from brokerage.eviction import Announcer
from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.kernel import bpf, pins
from kernel_steer.engine.kernel.layout import FLOW_BYTES, Word
from kernel_steer.listener.base import Notice
from kernel_steer.measure import backend
from kernel_steer.measure.api import request
from kernel_steer.measure.gateway import NODES, run_gateway
from kernel_steer.measure.machine import Part
from kernel_steer.measure.node import LIVE, run_node
from kernel_steer.measure.steered import run_ports
from kernel_steer.measure.story import start_backends
from kernel_steer.signals import Signal, connect, known_gateways, publish
from tests.brokerage.test_node_worker import signals, until
from tests.kernel_steer.kernel_support import needs_kernel_engine

pytestmark = needs_kernel_engine
NOTICE = Notice("aws", "terminate", None, NODES[0])
TICK_S = 0.02


class Gateway:
    """The real one in a process of its own, with the kernel engine and one live answer, and its maps."""

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._nodes = [Part(context, run_node, TICK_S) for _ in NODES]
        ports = [node.first for node in self._nodes]
        self._gateway = Part(context, run_gateway, "kernel", ports, url, settings.STEER_SIGNAL_KEY, 4)
        self.client = socket.create_connection(("127.0.0.1", self._gateway.first[0]))
        self.client.settimeout(30)
        self.client.sendall(request(LIVE))
        with connect(url) as client:
            (address,) = until(lambda: known_gateways(client))
        self._folder = pins.ROOT / address.pins
        self._maps = [bpf.open_pin(str(self._folder / name)) for name in ("node", "flows")]
        self._flows = mmap.mmap(self._maps[1], mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)

    def word(self, word: Word) -> int:
        """Of the one flow."""
        at = word * 8
        assert at < FLOW_BYTES
        return int.from_bytes(self._flows[at : at + 8], "little")

    def first_live(self, node: str) -> int:
        return pins.first_live_epoch(self._maps[0], node)

    @property
    def first_live_epoch(self) -> int:
        return self.first_live(NODES[0])

    def hear_tokens(self, count: int) -> None:
        heard = b""
        while heard.count(b'"token_ids"') < count:
            data = self.client.recv(65536)
            assert data, "the answer ended"
            heard += data

    def stop(self) -> None:
        """From now on it does nothing at all."""
        os.kill(self._gateway.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._gateway.pid, signal.SIGCONT)

    def end(self) -> None:
        for part in (*self._nodes, self._gateway):
            part.end()
        self.client.close()
        self._flows.close()
        for fd in self._maps:
            os.close(fd)
        pins.remove(self._folder)


@pytest.fixture
def gateway(valkey_server: Any, redis_client: Any) -> Iterator[Gateway]:
    made = Gateway(valkey_server.url)
    yield made
    made.end()


@pytest.fixture
def announcer(valkey_server: Any, gateway: Gateway) -> Iterator[Announcer]:
    app = Celery("test", broker=valkey_server.url.replace("unix://", "redis+socket://"), set_as_current=False)
    made = Announcer(app=app, node=NODES[0], epoch=0)
    made.start()
    until(lambda: made._book.own_host.engines == 1)
    yield made
    made.stop()
    app.close()


def test_a_stopped_gateway_is_flipped_and_flipped_back(gateway: Gateway, announcer: Announcer) -> None:
    until(lambda: gateway.word(Word.REDIRECTED))
    gateway.stop()
    gateway.hear_tokens(3)  # the kernel goes on by itself
    announcer.announce(NOTICE)
    assert gateway.first_live_epoch == 1
    # The program heeds it: what comes now waits for the gateway, which may move the answer.
    passed = gateway.word(Word.PASSED)
    until(lambda: gateway.word(Word.PASSED) > passed)
    announcer.cancel(NOTICE)
    assert gateway.first_live_epoch == 0
    gateway.go_on()
    gateway.hear_tokens(3)


def test_the_gateway_learns_of_it_by_the_carriers_and_comes_to_the_same(
    gateway: Gateway, announcer: Announcer, redis_client: Any
) -> None:
    gateway.stop()
    announcer.announce(NOTICE)
    announcer.cancel(NOTICE)
    announcer.announce(NOTICE)
    assert announcer.flush(10)
    assert [one.action for one in signals(redis_client)] == ["terminate", "cancel", "terminate"]
    gateway.go_on()
    _hear_all_so_far(gateway, redis_client)
    assert gateway.first_live_epoch == 1


def _hear_all_so_far(gateway: Gateway, client: Any) -> None:
    """A last word about the other node, by the stream alone, which a gateway hears in its order."""
    last = Signal(NODES[1], 0, "terminate", "aws", datetime.now(UTC))
    publish(client, last, settings.STEER_SIGNAL_KEY)
    until(lambda: gateway.first_live(NODES[1]) == 1)


def test_the_next_request_of_a_steered_port_goes_to_the_standby_though_the_gateway_is_stopped(
    valkey_server: Any, redis_client: Any
) -> None:
    context = multiprocessing.get_context("spawn")
    nodes = start_backends(context)
    key = settings.STEER_SIGNAL_KEY
    ports = [node.first for node in nodes]
    door = Part(context, run_ports, "kernel", ports, valkey_server.url, key, 4)
    client = socket.create_connection(("127.0.0.1", door.first[0]))
    client.settimeout(30)

    def ask() -> bytes:
        """Which node answers."""
        client.sendall(backend.request("/1/1/100"))
        return client.recv(65536)[backend.NAME_AT :][:1]

    app = Celery("test", broker=valkey_server.url.replace("unix://", "redis+socket://"), set_as_current=False)
    announcer = Announcer(app=app, node=NODES[0], epoch=0)
    announcer.start()
    until(lambda: announcer._book.own_host.engines == 1)
    # There and back once: then the standby, which is connected a moment after the client, stands by.
    announcer.announce(NOTICE)
    until(lambda: ask() == b"b")
    announcer.cancel(NOTICE)
    until(lambda: ask() == b"a")
    assert announcer.flush(10)
    os.kill(door.pid, signal.SIGSTOP)
    announcer.announce(NOTICE)
    assert [ask() for _ in range(3)] == [b"b"] * 3
    announcer.cancel(NOTICE)
    assert [ask() for _ in range(3)] == [b"a"] * 3
    os.kill(door.pid, signal.SIGCONT)
    assert ask() == b"a"
    announcer.stop()
    app.close()
    client.close()
    for part in (door, *nodes):
        part.end()
    pins.remove(pins.ROOT / door.first[2])


def test_a_node_that_two_sources_take_stays_away_until_both_take_it_back(
    gateway: Gateway, announcer: Announcer
) -> None:
    farewell = Notice("sigterm", "terminate", None, NODES[0])
    gateway.stop()
    for notice in (NOTICE, farewell):
        announcer.announce(notice)
    announcer.cancel(NOTICE)
    assert gateway.first_live_epoch == 1
    announcer.cancel(farewell)
    assert gateway.first_live_epoch == 0


def test_engines_of_another_platform_on_this_host_are_left_alone(
    gateway: Gateway, announcer: Announcer, redis_client: Any
) -> None:
    """They may know a node of the same name. What is not registered here is not ours."""
    other = pins.Owner()
    fd = bpf.create_map(bpf.MapKind.HASH, key_bytes=8, value_bytes=8, max_entries=8)
    other.pin("node", fd)
    announcer._book.refresh()
    announcer.announce(NOTICE)
    assert gateway.first_live_epoch == 1
    assert not pins.first_live_epoch(fd, NODES[0])
    assert pins.write_flip(fd, NodeKey(NODES[0], 0))  # and could have been written
    other.close()
    os.close(fd)
