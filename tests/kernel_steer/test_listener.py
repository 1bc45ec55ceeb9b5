"""The AWS listener against a metadata service that answers, and misbehaves, as AWS's does."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kernel_steer.listener.aws import AWSMetadata
from kernel_steer.listener.base import Listener, Notice, SourceUnavailable
from tests.kernel_steer.metadata import Machine, wait_for_polls


def source(machine: Machine, **options: Any) -> AWSMetadata:
    return AWSMetadata(machine.url, "a", **options)


# --- one poll -------------------------------------------------------------------------------------------


def test_nothing_scheduled_is_no_notice(machine: Machine) -> None:
    assert source(machine).poll() == []


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_a_scheduled_interruption_is_a_notice(machine: Machine, action: str) -> None:
    deadline = machine.order(schedule={"action": action, "in_s": 120})["deadline"]
    assert source(machine).poll() == [Notice("aws", action, datetime.fromisoformat(deadline), "a")]


def test_a_cancelled_interruption_is_gone(machine: Machine) -> None:
    machine.order(schedule={})
    machine.order(cancel=True)
    assert source(machine).poll() == []


def test_a_deadline_in_the_past_still_counts(machine: Machine) -> None:
    machine.order(schedule={"in_s": -600})
    (notice,) = source(machine).poll()
    assert notice.deadline is not None
    assert notice.deadline < datetime.now(UTC)


def test_rebalance_is_advice_and_moves_nothing(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.order(rebalance=True)
    with caplog.at_level(logging.INFO):
        assert source(machine).poll() == []
    assert "rebalance recommended" in caplog.text


def test_the_legacy_item_is_believed_where_it_alone_speaks(machine: Machine) -> None:
    deadline = machine.order(schedule={}, faults={"legacy": True})["deadline"]
    aws = source(machine)
    notice = Notice("aws", "terminate", datetime.fromisoformat(deadline), "a")
    assert (aws.poll(), aws.poll()) == ([notice], [notice])
    machine.order(faults={})
    assert [each.key() for each in aws.poll()] == [notice.key()]


def test_a_legacy_item_that_holds_no_time_means_nothing(machine: Machine) -> None:
    machine.order(schedule={}, faults={"legacy": True, "body": "not a time value"})
    assert source(machine).poll() == []


def test_the_legacy_item_is_asked_for_rarely(machine: Machine) -> None:
    aws = source(machine)
    for _ in range(10):
        aws.poll()
    # The token, the advice, the legacy item, and ten times what counts.
    assert machine.counters["requests"] == 13


def test_a_notice_for_another_instance_is_ignored(machine: Machine) -> None:
    machine.order(schedule={}, faults={"foreign": "i-other"})
    assert source(machine).poll() == []


def test_a_notice_that_names_this_instance_counts(machine: Machine) -> None:
    machine.order(schedule={}, faults={"foreign": machine.name})
    assert len(source(machine).poll()) == 1


def test_one_token_serves_many_polls(machine: Machine) -> None:
    aws = source(machine)
    for _ in range(5):
        aws.poll()
    assert machine.counters["tokens_issued"] == 1


def test_a_token_is_renewed_before_it_expires(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    aws = source(machine, token_ttl_s=300)
    aws.poll()
    late = time.monotonic() + 241
    monkeypatch.setattr("kernel_steer.listener.http.time.monotonic", lambda: late)
    aws.poll()
    assert machine.counters["tokens_issued"] == 2


def test_a_void_token_is_replaced_within_the_same_poll(machine: Machine) -> None:
    aws = source(machine)
    aws.poll()
    machine.order(schedule={}, expire_tokens=True)
    assert len(aws.poll()) == 1
    assert machine.counters["tokens_issued"] == 2


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_a_refusing_service_is_reported_and_not_taken_for_an_answer(machine: Machine, status: int) -> None:
    machine.order(schedule={}, faults={"status": status})
    with pytest.raises(SourceUnavailable, match=str(status)):
        source(machine).poll()


@pytest.mark.parametrize(
    "body", ["", "<html>", "[]", '{"time": "2020-04-24T17:11:44Z"}', '{"action": 5}', '"x"']
)
def test_a_payload_that_is_not_awss_is_reported(machine: Machine, body: str) -> None:
    machine.order(schedule={}, faults={"body": body})
    with pytest.raises(SourceUnavailable):
        source(machine).poll()


def test_an_unreadable_time_does_not_hide_the_notice(machine: Machine) -> None:
    machine.order(schedule={}, faults={"body": '{"action": "terminate", "time": "soon"}'})
    assert source(machine).poll() == [Notice("aws", "terminate", None, "a")]


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
    notices = listen(source(machine))
    machine.order(schedule={})
    assert notices.get(timeout=60).action == "terminate"
    wait_for_polls(machine, 5)
    assert notices.empty()


def test_a_time_that_wobbles_makes_no_second_notice(machine: Machine, listen) -> None:
    # Half a minute before a rounding edge, so that the wobble of under a second cannot cross it.
    now = datetime.now(UTC)
    in_s = 120 - now.second - now.microsecond / 1e6
    machine.order(schedule={"in_s": in_s}, faults={"jitter": True})
    notices = listen(source(machine))
    notices.get(timeout=60)
    wait_for_polls(machine, 10)
    assert notices.empty()


def test_another_deadline_is_another_notice(machine: Machine, listen) -> None:
    notices = listen(source(machine))
    machine.order(schedule={"in_s": 120})
    first = notices.get(timeout=60)
    machine.order(schedule={"in_s": 600})
    assert notices.get(timeout=60).deadline > first.deadline


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
    notices = listen(source(machine))
    wait_for_polls(machine, 4)
    machine.order(schedule={})
    assert notices.get(timeout=60).action == "terminate"


def test_a_slow_service_is_given_up_and_asked_again_one_call_at_a_time(machine: Machine, listen) -> None:
    machine.order(schedule={}, faults={"slow_s": 5})
    notices = listen(source(machine, timeout_s=0.05))
    wait_for_polls(machine, 3)
    machine.order(faults={})
    assert notices.get(timeout=60).action == "terminate"


def test_only_one_call_is_ever_outstanding(machine: Machine, listen) -> None:
    machine.order(faults={"slow_s": 0.01})
    listen(source(machine))
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
    listener = Listener(source(machine), deliver, interval_s=0.02)
    listener.start()
    assert delivered.get(timeout=60).action == "terminate"
    listener.stop.set()
    listener.join()


class Script:
    """A source that says what the test wants: one entry per poll, then the last one for ever."""

    name = "script"
    interval_s = 0.01

    def __init__(self, *polls: Any) -> None:
        self._polls = list(polls)
        self.acknowledged: queue.Queue[Notice] = queue.Queue()
        self._polled = threading.Semaphore(0)

    def wait_for_polls(self, count: int) -> None:
        """Until `count` more polls were made, after those that were made by now."""
        while self._polled.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self._polled.acquire(timeout=60)

    def poll(self) -> list[Notice]:
        self._polled.release()
        answer = self._polls.pop(0) if len(self._polls) > 1 else self._polls[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def acknowledge(self, notice: Notice) -> None:
        self.acknowledged.put(notice)


GOING = Notice("script", "stop", None, "a")
AWAY = SourceUnavailable("status 503")


def test_an_unforeseen_error_does_not_end_the_listener(listen) -> None:
    notices = listen(Script(KeyError("surprise"), [GOING], []))
    assert notices.get(timeout=60).action == "stop"


def test_repeated_and_reordered_notices_are_passed_on_once(listen) -> None:
    first, second = (Notice("script", "stop", None, "a", event=name) for name in ("1", "2"))
    end = Notice("script", "stop", None, "a", event="end")
    notices = listen(Script([first], [second, first], [first, second], [first], [second, second], [end]))
    assert [notices.get(timeout=60) for _ in range(3)] == [first, second, end]


# --- cancelled ------------------------------------------------------------------------------------------


def test_a_notice_that_is_gone_is_cancelled_and_news_when_it_comes_back(machine: Machine, listen) -> None:
    cancelled: queue.Queue[Notice] = queue.Queue()
    notices = listen(source(machine), on_cancelled=cancelled.put, cancelled_after_s=0.05)
    machine.order(schedule={})
    notice = notices.get(timeout=60)
    machine.order(cancel=True)
    assert cancelled.get(timeout=60) == notice
    machine.order(schedule={})
    assert notices.get(timeout=60).action == "terminate"


def test_one_wrong_answer_does_not_bring_a_doomed_node_back(listen) -> None:
    cancelled: queue.Queue[Notice] = queue.Queue()
    end = Notice("script", "stop", None, "a", event="end")
    script = Script([GOING], [], [GOING], [], [], AWAY, [], [], [GOING], [end])
    notices = listen(script, on_cancelled=cancelled.put, cancelled_after_s=0)
    assert [notices.get(timeout=60) for _ in range(2)] == [GOING, end]
    assert cancelled.empty()


def test_a_sick_service_is_no_cancellation(machine: Machine, listen) -> None:
    cancelled: queue.Queue[Notice] = queue.Queue()
    notices = listen(source(machine), on_cancelled=cancelled.put, cancelled_after_s=0)
    machine.order(schedule={})
    notices.get(timeout=60)
    machine.order(faults={"status": 503})
    wait_for_polls(machine, 5)
    assert cancelled.empty()


# --- acknowledged ---------------------------------------------------------------------------------------


def test_the_provider_is_told_once_and_only_when_the_work_is_done(listen) -> None:
    drained = threading.Event()
    asked = threading.Semaphore(0)

    def is_drained(_: Notice) -> bool:
        asked.release()
        return drained.is_set()

    script = Script([GOING])
    listen(script, is_drained=is_drained)
    assert asked.acquire(timeout=60)
    assert asked.acquire(timeout=60)
    assert script.acknowledged.empty()
    drained.set()
    assert script.acknowledged.get(timeout=60) == GOING
    script.wait_for_polls(5)
    assert script.acknowledged.empty()


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
        Notice("aws", "terminate", at, "a", event="1"),
    ]
    assert len({notice.key(), *(other.key() for other in others)}) == 6


def test_where_the_provider_names_the_event_its_time_may_change() -> None:
    at = datetime(2026, 3, 1, 12, 0, 10, tzinfo=UTC)
    keys = {
        Notice("azure", "preempt", when, "a", event="1").key() for when in (at, at + timedelta(hours=1), None)
    }
    assert len(keys) == 1
