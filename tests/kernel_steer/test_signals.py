"""The signed stream "this node goes away", against a real Valkey."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from apex.local.valkey import EmbeddedValkey
from kernel_steer.signals import STREAM, Signal, SignalReader, SignalRefused, connect, publish

KEY = b"k" * 32


def make_signal(**changes: object) -> Signal:
    now = datetime.now(UTC)
    signal = Signal("a", 7, "terminate", "aws", signal_at=now, deadline=now + timedelta(minutes=2))
    return replace(signal, **changes)


class Reading:
    """A SignalReader in a thread, as the gateway runs it."""

    def __init__(self, url: str, after: str | None = None) -> None:
        self.reader = SignalReader(connect(url), KEY, after=after)
        self.seen: queue.Queue[Signal] = queue.Queue()
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for signal in self.reader.read(self.stop):
            self.seen.put(signal)

    def next(self) -> Signal:
        return self.seen.get(timeout=60)

    def close(self) -> None:
        self.stop.set()
        self._thread.join()


@pytest.fixture
def read(valkey_server: EmbeddedValkey) -> Iterator[Callable[..., Reading]]:
    readings: list[Reading] = []

    def start(url: str = valkey_server.url, after: str | None = None) -> Reading:
        readings.append(Reading(url, after))
        return readings[-1]

    yield start
    for reading in readings:
        reading.close()


def test_a_published_signal_is_read_as_it_was_sent(redis_client, read) -> None:
    signal = make_signal()
    reading = read()
    publish(redis_client, signal, KEY)
    assert reading.next() == signal


def test_a_signal_without_deadline_and_with_any_name_survives_the_journey(redis_client, read) -> None:
    signal = make_signal(node="größer 节点", deadline=None)
    publish(redis_client, signal, KEY)
    assert read().next() == signal


def test_a_reader_that_starts_late_still_sees_the_signal(redis_client, read) -> None:
    signal = make_signal()
    publish(redis_client, signal, KEY)
    assert read().next() == signal


def test_a_reader_goes_on_behind_the_id_it_is_given(redis_client, read) -> None:
    publish(redis_client, make_signal(node="old"), KEY)
    ((last_id, _),) = redis_client.xrange(STREAM)
    publish(redis_client, make_signal(node="new"), KEY)
    assert read(after=last_id).next().node == "new"


@pytest.mark.parametrize(
    "fields",
    [
        make_signal().to_fields(b"another key" * 3),
        make_signal().to_fields(KEY) | {"node": "b"},
        make_signal().to_fields(KEY) | {"extra": "field"},
        make_signal().to_fields(KEY) | {"mac": "é" * 64},
        {"node": "a"},
        {b"node": b"\xff\xfe", b"mac": b"\xff"},
        make_signal(signal_at=datetime.now(UTC) - timedelta(hours=1)).to_fields(KEY),
        make_signal(signal_at=datetime.now(UTC) + timedelta(hours=1)).to_fields(KEY),
    ],
    ids=["other key", "changed", "extra field", "odd mac", "unsigned", "no text", "stale", "from the future"],
)
def test_a_bad_entry_is_refused_and_the_next_one_is_read(redis_client, read, fields) -> None:
    reading = read()
    redis_client.xadd(STREAM, fields)
    good = make_signal()
    publish(redis_client, good, KEY)
    assert reading.next() == good
    assert reading.reader.refused == 1


def test_the_refusal_names_the_reason_and_no_secret() -> None:
    with pytest.raises(SignalRefused, match="wrong signature") as caught:
        Signal.from_fields(make_signal().to_fields(b"other"), KEY)
    assert KEY.decode() not in str(caught.value)


def test_clocks_that_differ_by_five_minutes_do_no_harm(redis_client, read) -> None:
    for minutes in (-5, 5):
        signal = make_signal(signal_at=datetime.now(UTC) + timedelta(minutes=minutes))
        publish(redis_client, signal, KEY)
    reading = read()
    assert {reading.next().signal_at, reading.next().signal_at}


def test_reading_goes_on_after_the_server_was_killed_and_came_back(tmp_path: Path, read) -> None:
    server = EmbeddedValkey(data=tmp_path / "data", sockets=tmp_path / "run")

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
        server.wait_ready(process)
        return process

    process = start()
    client = connect(server.url)
    try:
        reading = read(server.url)
        publish(client, make_signal(node="before"), KEY)
        assert reading.next().node == "before"
        process.kill()
        process.wait()
        process = start()
        client.close()
        publish(client, make_signal(node="after"), KEY)
        assert reading.next().node == "after"
    finally:
        client.close()
        process.kill()
        process.wait()


def test_a_reader_may_start_before_the_server(tmp_path: Path, read) -> None:
    server = EmbeddedValkey(data=tmp_path / "data", sockets=tmp_path / "run")
    reading = read(server.url)
    process = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
    try:
        server.wait_ready(process)
        client = connect(server.url)
        publish(client, make_signal(), KEY)
        client.close()
        assert reading.next().node == "a"
    finally:
        process.kill()
        process.wait()
