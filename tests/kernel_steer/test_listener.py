"""The AWS listener against a metadata service that answers, and misbehaves, as AWS's does."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from apex.local.metadata_service import MetadataService
from kernel_steer.listener.aws import AWSMetadata
from kernel_steer.listener.base import Listener, Notice, SourceUnavailable


class Machine:
    """One instance of a running metadata service, and what happens to it."""

    def __init__(self, base: str, name: str) -> None:
        self.name = name
        self.url = f"{base}/{name}"

    def order(self, **order: Any) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/_control", data=json.dumps(order).encode())
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    @property
    def counters(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/_control") as response:
            return json.load(response)

    def source(self, **options: Any) -> AWSMetadata:
        return AWSMetadata(self.url, "a", **options)


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    async def start() -> web.AppRunner:
        runner = web.AppRunner(MetadataService().application(), handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def machine(service: str, request: pytest.FixtureRequest) -> Machine:
    return Machine(service, f"i-{abs(hash(request.node.name)):x}")


@pytest.fixture
def listen() -> Iterator[Callable[..., queue.Queue[Notice]]]:
    """Starts a Listener that polls fast, and gives the queue its notices arrive in."""
    running: list[Listener] = []

    def start(source: AWSMetadata) -> queue.Queue[Notice]:
        notices: queue.Queue[Notice] = queue.Queue()
        running.append(Listener(source, notices.put, interval_s=0.02))
        running[-1].start()
        return notices

    yield start
    for listener in running:
        listener.stop.set()
        listener.join()


def wait_for_polls(machine: Machine, count: int) -> None:
    """Until `count` more requests have come in."""
    goal = machine.counters["requests"] + count
    for _ in range(2_000):
        if machine.counters["requests"] >= goal:
            return
        threading.Event().wait(0.005)
    raise AssertionError("the listener stopped asking")


# --- one poll -------------------------------------------------------------------------------------------


def test_nothing_scheduled_is_no_notice(machine: Machine) -> None:
    assert machine.source().poll() == []


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_a_scheduled_interruption_is_a_notice(machine: Machine, action: str) -> None:
    deadline = machine.order(schedule={"action": action, "in_s": 120})["deadline"]
    assert machine.source().poll() == [Notice("aws", action, datetime.fromisoformat(deadline), "a")]


def test_a_cancelled_interruption_is_gone(machine: Machine) -> None:
    machine.order(schedule={})
    machine.order(cancel=True)
    assert machine.source().poll() == []


def test_a_deadline_in_the_past_still_counts(machine: Machine) -> None:
    machine.order(schedule={"in_s": -600})
    (notice,) = machine.source().poll()
    assert notice.deadline is not None
    assert notice.deadline < datetime.now(UTC)


def test_rebalance_is_advice_and_moves_nothing(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.order(rebalance=True)
    with caplog.at_level(logging.INFO):
        assert machine.source().poll() == []
    assert "rebalance recommended" in caplog.text


def test_a_notice_for_another_instance_is_ignored(machine: Machine) -> None:
    machine.order(schedule={}, faults={"foreign": "i-other"})
    assert machine.source().poll() == []


def test_a_notice_that_names_this_instance_counts(machine: Machine) -> None:
    machine.order(schedule={}, faults={"foreign": machine.name})
    assert len(machine.source().poll()) == 1


def test_one_token_serves_many_polls(machine: Machine) -> None:
    source = machine.source()
    for _ in range(5):
        source.poll()
    assert machine.counters["tokens_issued"] == 1


def test_a_token_is_renewed_before_it_expires(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    source = machine.source(token_ttl_s=300)
    source.poll()
    late = time.monotonic() + 241
    monkeypatch.setattr("kernel_steer.listener.aws.time.monotonic", lambda: late)
    source.poll()
    assert machine.counters["tokens_issued"] == 2


def test_a_void_token_is_replaced_within_the_same_poll(machine: Machine) -> None:
    source = machine.source()
    source.poll()
    machine.order(schedule={}, expire_tokens=True)
    assert len(source.poll()) == 1
    assert machine.counters["tokens_issued"] == 2


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_a_refusing_service_is_reported_and_not_taken_for_an_answer(machine: Machine, status: int) -> None:
    machine.order(schedule={}, faults={"status": status})
    with pytest.raises(SourceUnavailable, match=str(status)):
        machine.source().poll()


@pytest.mark.parametrize(
    "body", ["", "<html>", "[]", '{"time": "2020-04-24T17:11:44Z"}', '{"action": 5}', '"x"']
)
def test_a_payload_that_is_not_awss_is_reported(machine: Machine, body: str) -> None:
    machine.order(schedule={}, faults={"body": body})
    with pytest.raises(SourceUnavailable):
        machine.source().poll()


def test_an_unreadable_time_does_not_hide_the_notice(machine: Machine) -> None:
    machine.order(schedule={}, faults={"body": '{"action": "terminate", "time": "soon"}'})
    assert machine.source().poll() == [Notice("aws", "terminate", None, "a")]


def test_a_dead_service_is_reported(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(SourceUnavailable):
        AWSMetadata(f"http://127.0.0.1:{port}", "a").poll()


def test_the_address_must_be_one() -> None:
    with pytest.raises(ValueError, match="http://host"):
        AWSMetadata("169.254.169.254", "a")


# --- the listener, for as long as the machine lives -----------------------------------------------------


def test_a_notice_is_passed_on_once(machine: Machine, listen) -> None:
    notices = listen(machine.source())
    machine.order(schedule={})
    assert notices.get(timeout=10).action == "terminate"
    wait_for_polls(machine, 5)
    assert notices.empty()


def test_a_time_that_wobbles_makes_no_second_notice(machine: Machine, listen) -> None:
    # Half a minute before a rounding edge, so that the wobble of under a second cannot cross it.
    now = datetime.now(UTC)
    in_s = 120 - now.second - now.microsecond / 1e6
    machine.order(schedule={"in_s": in_s}, faults={"jitter": True})
    notices = listen(machine.source())
    notices.get(timeout=10)
    wait_for_polls(machine, 10)
    assert notices.empty()


def test_another_deadline_is_another_notice(machine: Machine, listen) -> None:
    notices = listen(machine.source())
    machine.order(schedule={"in_s": 120})
    first = notices.get(timeout=10)
    machine.order(schedule={"in_s": 600})
    assert notices.get(timeout=10).deadline > first.deadline


@pytest.mark.parametrize(
    "faults",
    [
        {"status": 503, "times": 4},
        {"status": 429, "times": 4},
        {"status": 401, "times": 4},
        {"token_status": 503, "times": 4},
        {"token_status": 404, "times": 4},
        {"status": 404, "times": 4},
    ],
    ids=str,
)
def test_a_sick_service_that_heals_loses_no_notice(machine: Machine, listen, faults: dict[str, Any]) -> None:
    machine.order(faults=faults)
    notices = listen(machine.source())
    wait_for_polls(machine, 4)
    machine.order(schedule={})
    assert notices.get(timeout=10).action == "terminate"


def test_a_slow_service_is_given_up_and_asked_again_one_call_at_a_time(machine: Machine, listen) -> None:
    machine.order(schedule={}, faults={"slow_s": 5})
    notices = listen(machine.source(timeout_s=0.05))
    wait_for_polls(machine, 3)
    machine.order(faults={})
    assert notices.get(timeout=10).action == "terminate"


def test_only_one_call_is_ever_outstanding(machine: Machine, listen) -> None:
    machine.order(faults={"slow_s": 0.01})
    listen(machine.source())
    wait_for_polls(machine, 6)
    assert machine.counters["outstanding_max"] == 1


def test_a_notice_whose_delivery_failed_comes_again(machine: Machine) -> None:
    delivered: queue.Queue[Notice] = queue.Queue()
    failures = iter([RuntimeError("broker away")])

    def deliver(notice: Notice) -> None:
        for error in failures:
            raise error
        delivered.put(notice)

    machine.order(schedule={})
    listener = Listener(machine.source(), deliver, interval_s=0.02)
    listener.start()
    assert delivered.get(timeout=10).action == "terminate"
    listener.stop.set()
    listener.join()


def test_an_unforeseen_error_does_not_end_the_listener() -> None:
    class Broken:
        name = "broken"
        answers = iter([KeyError("surprise"), [Notice("broken", "stop", None, "a")]])

        def poll(self) -> list[Notice]:
            answer = next(self.answers, [])
            if isinstance(answer, Exception):
                raise answer
            return answer

    notices: queue.Queue[Notice] = queue.Queue()
    listener = Listener(Broken(), notices.put, interval_s=0.01)
    listener.start()
    assert notices.get(timeout=10).action == "stop"
    listener.stop.set()
    listener.join()


# --- when two notices are the same ----------------------------------------------------------------------


def test_seconds_do_not_make_a_notice_new_but_minutes_the_action_and_the_machine_do() -> None:
    at = datetime(2026, 3, 1, 12, 0, 10, tzinfo=UTC)
    notice = Notice("aws", "terminate", at, "a")
    assert notice.key() == Notice("aws", "terminate", at + timedelta(seconds=0.9), "a").key()
    others = [
        Notice("aws", "terminate", at + timedelta(minutes=1), "a"),
        Notice("aws", "stop", at, "a"),
        Notice("aws", "terminate", at, "b"),
        Notice("aws", "terminate", None, "a"),
    ]
    assert len({notice.key(), *(other.key() for other in others)}) == 5
