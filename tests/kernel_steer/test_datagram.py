"""The fast carrier: real sockets, a real Valkey, and each of the two carriers lost in turn."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from apex.local.valkey import EmbeddedValkey
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.server import AddressInUse, Config, _signal_path
from kernel_steer.gateway.signal_path import SignalPath
from kernel_steer.gateway.steering import DATAGRAM, STREAM, Steering
from kernel_steer.signals import (
    DatagramReceiver,
    DatagramSender,
    GatewayAddress,
    GatewayBook,
    Refusals,
    Refused,
    Signal,
    SignalRefused,
    connect,
    gateway_reports,
    known_gateways,
    publish,
    register,
)
from kernel_steer.signals.datagram import local_name
from kernel_steer.signals.gateways import entry_key
from kernel_steer.signals.report import INDEX
from tests.kernel_steer.harness import AdmissionDouble

KEY = b"k" * 32


def signal(node: str = "a", **changes: Any) -> Signal:
    return replace(Signal(node, 1, "terminate", "aws", datetime.now(UTC)), **changes)


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if value := condition():
            return value
        threading.Event().wait(0.005)
    raise AssertionError("it did not happen in time")


@pytest.fixture
async def steering() -> AsyncIterator[Steering]:
    yield Steering(RelayEngine(), AdmissionDouble([]), asyncio.get_running_loop())
    await asyncio.sleep(0.01)  # reports that are under way


@pytest.fixture
def gateway(steering: Steering) -> Iterator[Callable[..., SignalPath]]:
    """Starts the listening side of a gateway."""
    running: list[SignalPath] = []

    def start(url: str, **options: Any) -> SignalPath:
        running.append(SignalPath(steering, redis_url=url, key=KEY, **options))
        running[-1].start()
        return running[-1]

    yield start
    for path in running:
        path.stop()
        path.join(10)


@pytest.fixture
def book() -> Iterator[Callable[[str], GatewayBook]]:
    """A node's list of gateways, refreshed by the test and not by time."""
    made: list[tuple[GatewayBook, redis.Redis]] = []

    def make(url: str) -> GatewayBook:
        client = connect(url)
        made.append((GatewayBook(client, threading.Event()), client))
        return made[-1][0]

    yield make
    for each, client in made:
        each._stop_event.set()
        each.run()  # only closes its sockets
        client.close()


def find(book: GatewayBook, count: int = 1) -> list[GatewayAddress]:
    def look() -> list[GatewayAddress]:
        book.refresh()
        return book.gateways if len(book.gateways) == count else []

    return until(look)


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[tuple[EmbeddedValkey, Callable[[], subprocess.Popen[bytes]]]]:
    """A server that the test may kill and start again, empty."""
    server = EmbeddedValkey(data=tmp_path / "data", sockets=tmp_path / "run")
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(server.command(), stdout=subprocess.DEVNULL))
        server.wait_ready(started[-1])
        return started[-1]

    yield server, start
    for process in started:
        process.kill()
        process.wait()


# --- one packet ----------------------------------------------------------------------------------------


@pytest.fixture
def receive() -> Iterator[Callable[..., tuple[DatagramReceiver, list[Signal], list[str]]]]:
    running: list[tuple[DatagramReceiver, threading.Thread]] = []

    def start(gateway: str = "g", **options: Any) -> tuple[DatagramReceiver, list[Signal], list[str]]:
        receiver = DatagramReceiver(gateway, KEY, **options)
        seen: list[Signal] = []
        refused: list[str] = []

        def read() -> None:
            seen.extend(receiver.read(lambda why: refused.append(why.reason.value)))

        thread = threading.Thread(target=read)
        thread.start()
        running.append((receiver, thread))
        return receiver, seen, refused

    yield start
    for receiver, thread in running:
        receiver.stop()
        thread.join()
        receiver.close()


def test_on_the_same_host_it_takes_the_unix_socket(receive) -> None:
    receiver, seen, _ = receive()
    sender = DatagramSender("g", "127.0.0.1", 9)  # UDP would lead nowhere
    sent = signal(node="größer 节点")
    assert sender.send(sent.to_datagram(KEY))
    assert until(lambda: seen) == [sent]
    sender.close()
    assert receiver.port > 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_from_another_host_it_takes_udp(receive, host: str) -> None:
    receiver, seen, _ = receive(host=host)
    sender = DatagramSender("not here", receiver.host, receiver.port)
    sent = signal()
    assert sender.send(sent.to_datagram(KEY))
    assert until(lambda: seen) == [sent]
    sender.close()


def test_a_unix_socket_that_takes_no_more_is_no_dead_end(receive) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
        full.bind(local_name("full"))  # nobody reads it
        receiver, seen, _ = receive()
        sender = DatagramSender("full", receiver.host, receiver.port)
        sent = signal()
        while not seen:
            sender.send(sent.to_datagram(KEY))
        assert seen[0] == sent
        sender.close()


def test_a_gateway_that_is_gone_does_not_disturb_the_sender(receive) -> None:
    receiver = DatagramReceiver("short", KEY)
    sender = DatagramSender("short", receiver.host, receiver.port)
    receiver.close()
    for _ in range(10):
        sender.send(signal().to_datagram(KEY))
    sender.close()


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (b"", "malformed"),
        (b"[]", "malformed"),
        (b'{"mac": 5}', "malformed"),
        (b"[" * 1_200, "malformed"),
        (b"\xff\xfe", "malformed"),
        (b'{"node": "a"}', "forged"),
        (b"x" * 4_000, "malformed"),
        (signal().to_datagram(b"another key"), "forged"),
        (signal(signal_at=datetime(2020, 1, 1, tzinfo=UTC)).to_datagram(KEY), "stale"),
    ],
    ids=["empty", "list", "number", "deep", "no text", "unsigned", "long", "other key", "stale"],
)
def test_a_bad_packet_is_refused_and_the_next_one_is_read(receive, packet: bytes, reason: str) -> None:
    receiver, seen, refused = receive()
    sender = DatagramSender("elsewhere", receiver.host, receiver.port)
    sent = signal()
    sender.send(packet)
    sender.send(sent.to_datagram(KEY))
    assert until(lambda: seen) == [sent]
    assert refused == [reason]
    sender.close()


def test_no_changed_packet_is_believed() -> None:
    packet = signal().to_datagram(KEY)
    chance = random.Random(7)
    for _ in range(2_000):
        changed = bytearray(packet)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        if bytes(changed) != packet:
            with pytest.raises(ValueError):
                Signal.from_datagram(bytes(changed), KEY)


def test_a_signal_that_fits_no_packet_is_not_cut() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        signal(node="n" * 2_000).to_datagram(KEY)


def test_an_address_that_is_taken_is_reported() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="in use"):
            DatagramReceiver("g", KEY, port=taken.getsockname()[1])


async def test_a_gateway_names_the_signal_address_that_is_taken(steering) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        config = Config("127.0.0.1", 0, "relay", Path("unused"), "redis://unused", KEY, signal_port=port)
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}"):
            _signal_path(config, steering)


# --- who is there --------------------------------------------------------------------------------------


def test_a_gateway_whose_entry_expired_is_taken_off_the_list(redis_client) -> None:
    for name in ("g1", "g2"):
        register(redis_client, GatewayAddress(name, "127.0.0.1", 4000))
    assert 0 < redis_client.ttl(entry_key("g1")) <= 15
    redis_client.delete(entry_key("g1"))  # as its end of life does
    assert [address.gateway for address in known_gateways(redis_client)] == ["g2"]
    assert redis_client.smembers(INDEX) == {"g2"}


@pytest.mark.parametrize("entry", ["", "{}", "[1]", '{"gateway": "x", "host": "h", "port": 0}', "\xff"])
def test_an_unreadable_entry_hides_no_other(redis_client, entry: str) -> None:
    register(redis_client, GatewayAddress("good", "127.0.0.1", 4000))
    redis_client.sadd(INDEX, "bad")
    redis_client.set(entry_key("bad"), entry)
    assert [address.gateway for address in known_gateways(redis_client)] == ["good"]


def test_a_host_that_does_not_resolve_hides_no_other(redis_client, valkey_server, book) -> None:
    register(redis_client, GatewayAddress("good", "127.0.0.1", 4000))
    register(redis_client, GatewayAddress("bad", "no.such.host.invalid", 4000))
    nodes_list = book(valkey_server.url)
    nodes_list.refresh()
    assert [address.gateway for address in nodes_list.gateways] == ["good"]


def test_a_gateway_that_stays_away_is_forgotten(redis_client, valkey_server, book, monkeypatch) -> None:
    register(redis_client, GatewayAddress("g", "127.0.0.1", 4000))
    nodes_list = book(valkey_server.url)
    nodes_list.refresh()
    redis_client.flushall()
    nodes_list.refresh()
    assert len(nodes_list.gateways) == 1  # Redis may have lost it; the gateway may live
    later = time.monotonic() + 61
    monkeypatch.setattr("kernel_steer.signals.gateways.time.monotonic", lambda: later)
    nodes_list.refresh()
    assert nodes_list.gateways == []


async def test_a_gateway_registers_and_signs_off(valkey_server, redis_client, gateway, book) -> None:
    path = gateway(valkey_server.url)
    nodes_list = book(valkey_server.url)
    assert await asyncio.to_thread(find, nodes_list) == [path.address]
    path.stop()
    await asyncio.to_thread(path.join, 10)
    assert known_gateways(redis_client) == []


async def test_what_a_gateway_has_heard_is_kept_beside_its_address(
    valkey_server, redis_client, gateway, steering, monkeypatch
) -> None:
    monkeypatch.setattr("kernel_steer.gateway.signal_path.REGISTER_EVERY_S", 0.02)
    path = gateway(valkey_server.url)
    word = signal()
    steering.apply(word, DATAGRAM)
    steering.apply(word, STREAM)
    steering.refuse(SignalRefused(Refused.FORGED, "forged"), DATAGRAM)
    await asyncio.to_thread(
        until, lambda: gateway_reports(redis_client).get(path.address.gateway) == steering.report()
    )
    report = steering.report()
    assert (report.engine, report.flips, report.first) == ("relay", 1, {DATAGRAM: 1})
    assert report.refused == [("forged", DATAGRAM, 1)]
    path.stop()
    await asyncio.to_thread(path.join, 10)
    assert gateway_reports(redis_client) == {}


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("redis://127.0.0.1:6379", "127.0.0.1"),
        ("unix:///tmp/valkey.sock", "127.0.0.1"),
        ("redis://no.such.host.invalid:6379", socket.gethostname()),
    ],
)
async def test_a_gateway_on_every_address_names_one_that_nodes_can_reach(
    steering, url: str, host: str
) -> None:
    path = SignalPath(steering, redis_url=url, key=KEY, host="0.0.0.0")
    assert path.address.host == host
    path._threads[0]._receiver.close()  # it was never started


# --- the whole way, with one carrier lost ----------------------------------------------------------------


async def test_the_datagram_flips_without_the_stream(
    valkey_server, redis_client, gateway, book, steering
) -> None:
    gateway(valkey_server.url)
    nodes_list = book(valkey_server.url)
    await asyncio.to_thread(find, nodes_list)
    assert nodes_list.send(signal(), KEY) == 1
    await asyncio.to_thread(until, lambda: steering.stats.flips)
    assert steering.stats.first == {DATAGRAM: 1}
    assert steering._admission.draining == {"a"}


async def test_every_registered_gateway_hears_it(
    valkey_server, redis_client, gateway, book, steering
) -> None:
    for _ in range(3):
        gateway(valkey_server.url)
    nodes_list = book(valkey_server.url)
    await asyncio.to_thread(find, nodes_list, 3)
    nodes_list.send(signal(), KEY)
    await asyncio.to_thread(until, lambda: steering.stats.heard[DATAGRAM] == 3)


async def test_with_datagrams_lost_the_stream_flips(
    valkey_server, redis_client, gateway, book, steering
) -> None:
    path = gateway(valkey_server.url)
    nodes_list = book(valkey_server.url)
    await asyncio.to_thread(find, nodes_list)
    path._threads[0].stop()  # the datagram reader: packets go nowhere from here on
    await asyncio.to_thread(path._threads[0].join)
    sent = signal()
    nodes_list.send(sent, KEY)
    publish(redis_client, sent, KEY)
    await asyncio.to_thread(until, lambda: steering.stats.flips)
    assert steering.stats.first == {STREAM: 1}


async def test_with_redis_down_the_datagram_flips(own_valkey, gateway, book, steering) -> None:
    server, start = own_valkey
    process = start()
    gateway(server.url)
    nodes_list = book(server.url)
    await asyncio.to_thread(find, nodes_list)
    process.kill()
    process.wait()
    nodes_list.refresh()  # fails, and the last list stays
    assert nodes_list.send(signal(), KEY) == 1
    await asyncio.to_thread(until, lambda: steering.stats.flips)
    assert steering.stats.first == {DATAGRAM: 1}


async def test_after_redis_came_back_empty_the_gateway_registers_again(own_valkey, gateway, book) -> None:
    server, start = own_valkey
    process = start()
    path = gateway(server.url)
    await asyncio.to_thread(find, book(server.url))
    process.kill()
    process.wait()
    client = connect(server.url)
    start()
    client.flushall()
    client.close()
    assert await asyncio.to_thread(find, book(server.url)) == [path.address]


# --- what is refused is told -----------------------------------------------------------------------------


async def test_refusals_are_summed_up_and_passed_on(
    valkey_server, redis_client, gateway, monkeypatch
) -> None:
    monkeypatch.setattr("kernel_steer.gateway.signal_path.REFUSALS_EVERY_S", 0)
    told: list[Refusals] = []
    path = gateway(valkey_server.url, on_refused=told.append)
    sender = DatagramSender(path.address.gateway, path.address.host, path.address.port)
    for number in range(5):
        sender.send(signal(str(number)).to_datagram(b"another key"))
    publish(redis_client, signal(), b"another key")
    await asyncio.to_thread(until, lambda: sum(each.count for each in told) == 6)
    sender.close()
    assert {(each.gateway, each.reason, each.carrier) for each in told} == {
        (path.address.gateway, "forged", DATAGRAM),
        (path.address.gateway, "forged", STREAM),
    }


async def test_a_flood_of_forged_packets_is_told_in_two_reports(
    valkey_server, redis_client, gateway, steering
) -> None:
    told: list[Refusals] = []
    path = gateway(valkey_server.url, on_refused=told.append)
    sender = DatagramSender(path.address.gateway, path.address.host, path.address.port)
    forged = signal().to_datagram(b"another key")
    sender.send(forged)
    await asyncio.to_thread(until, lambda: told)
    for _ in range(200):
        sender.send(forged)
    await asyncio.to_thread(until, lambda: steering.stats.refused["forged", DATAGRAM] > 100)
    sender.close()
    path._threads[0].stop()  # the reader first, so that nothing is counted after the last report
    await asyncio.to_thread(path._threads[0].join)
    path.stop()
    await asyncio.to_thread(path.join, 10)
    assert len(told) == 2
    assert sum(each.count for each in told) == steering.stats.refused["forged", DATAGRAM]


async def test_a_hook_that_fails_stops_nothing(valkey_server, redis_client, gateway, steering) -> None:
    def away(_: Refusals) -> None:
        raise ConnectionError("broker away")

    path = gateway(valkey_server.url, on_refused=away)
    sender = DatagramSender(path.address.gateway, path.address.host, path.address.port)
    sender.send(signal().to_datagram(b"another key"))
    await asyncio.to_thread(until, lambda: steering.stats.refused)
    path._threads[2].stop()
    await asyncio.to_thread(path._threads[2].join)  # has passed it on, in vain
    sender.send(signal().to_datagram(KEY))
    await asyncio.to_thread(until, lambda: steering.stats.flips)
    sender.close()
