"""GCP, Azure, Alibaba and Tencent against services that answer, and misbehave, as theirs do."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kernel_steer.listener.aws import AWSMetadata
from kernel_steer.listener.azure import AzureMetadata
from kernel_steer.listener.base import Notice, Source, SourceUnavailable
from kernel_steer.listener.gcp import GCPMetadata
from kernel_steer.listener.providers import SOURCES, make_source
from kernel_steer.listener.termination_time import AlibabaMetadata, TencentMetadata
from tests.kernel_steer.metadata import Machine, wait_for_polls

PATHS = {"alibaba": "/alibaba", "tencent": "/tencent"}
ACTIONS = {"gcp": "preempt", "azure": "preempt"}
ALL = sorted(SOURCES)


def gcp(machine: Machine, **options: Any) -> GCPMetadata:
    return GCPMetadata(machine.url, "a", **({"wait_s": 1} | options))


def azure(machine: Machine, **options: Any) -> AzureMetadata:
    return AzureMetadata(machine.url, "a", **options)


def alibaba(machine: Machine, **options: Any) -> AlibabaMetadata:
    return AlibabaMetadata(f"{machine.url}/alibaba", "a", **options)


def tencent(machine: Machine, **options: Any) -> TencentMetadata:
    return TencentMetadata(f"{machine.url}/tencent", "a", **options)


def aws(machine: Machine, **options: Any) -> AWSMetadata:
    return AWSMetadata(machine.url, "a", **options)


MAKERS: dict[str, Callable[..., Source]] = {
    "aws": aws,
    "gcp": gcp,
    "azure": azure,
    "alibaba": alibaba,
    "tencent": tencent,
}


# --- what all of them do --------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ALL)
def test_nothing_scheduled_is_no_notice(machine: Machine, provider: str) -> None:
    assert make_source(provider, machine.url + PATHS.get(provider, ""), "a").poll() == []


@pytest.mark.parametrize("provider", ALL)
def test_a_scheduled_end_is_a_notice_with_its_time_in_utc(machine: Machine, provider: str) -> None:
    deadline = machine.order(schedule={"in_s": 30})["deadline"]
    (notice,) = MAKERS[provider](machine).poll()
    assert (notice.source, notice.instance) == (provider, "a")
    assert notice.action == ACTIONS.get(provider, "terminate")
    assert notice.deadline is not None
    assert abs(notice.deadline - datetime.fromisoformat(deadline)) < timedelta(seconds=5)


@pytest.mark.parametrize("provider", ALL)
def test_it_is_passed_on_once_and_taken_back_when_cancelled(machine: Machine, listen, provider: str) -> None:
    cancelled: queue.Queue[Notice] = queue.Queue()
    notices = listen(MAKERS[provider](machine), on_cancelled=cancelled.put, cancelled_after_s=0.01)
    wait_for_polls(machine, 2)
    machine.order(schedule={})
    notice = notices.get(timeout=60)
    wait_for_polls(machine, 3)
    assert notices.empty()
    machine.order(cancel=True)
    assert cancelled.get(timeout=60) == notice


@pytest.mark.parametrize("provider", ALL)
@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_a_sick_service_that_heals_loses_no_notice(
    machine: Machine, listen, provider: str, status: int
) -> None:
    machine.order(faults={"status": status, "times": 3})
    notices = listen(MAKERS[provider](machine))
    wait_for_polls(machine, 3)
    machine.order(schedule={})
    assert notices.get(timeout=60).source == provider


@pytest.mark.parametrize("provider", ALL)
@pytest.mark.parametrize("status", [401, 429, 503])
def test_a_refusing_service_is_not_taken_for_an_answer(machine: Machine, provider: str, status: int) -> None:
    machine.order(schedule={}, faults={"status": status})
    with pytest.raises(SourceUnavailable, match=str(status)):
        MAKERS[provider](machine).poll()


@pytest.mark.parametrize("provider", ALL)
def test_a_clock_that_is_off_by_five_minutes_delays_nothing(machine: Machine, listen, provider: str) -> None:
    for clock_off_s in (-300, 300):
        machine.order(schedule={"in_s": 30}, faults={"clock_off_s": clock_off_s})
        assert listen(MAKERS[provider](machine)).get(timeout=60).source == provider


@pytest.mark.parametrize("provider", ALL)
def test_a_deadline_that_has_passed_still_counts(machine: Machine, provider: str) -> None:
    machine.order(schedule={"in_s": -600})
    assert len(MAKERS[provider](machine).poll()) == 1


@pytest.mark.parametrize("provider", ALL)
def test_a_time_that_wobbles_makes_no_second_notice(machine: Machine, listen, provider: str) -> None:
    # Half a minute before a rounding edge, so that the wobble of under a second cannot cross it.
    now = datetime.now(UTC)
    in_s = 120 - now.second - now.microsecond / 1e6
    machine.order(schedule={"in_s": in_s}, faults={"jitter": True})
    notices = listen(MAKERS[provider](machine))
    notices.get(timeout=60)
    wait_for_polls(machine, 3)
    assert notices.empty()


@pytest.mark.parametrize("provider", ALL)
def test_a_listener_that_starts_during_the_drain_hears_it_too(
    machine: Machine, listen, provider: str
) -> None:
    machine.order(schedule={})
    for _ in range(2):  # the second is the worker's next life
        assert listen(MAKERS[provider](machine)).get(timeout=60).source == provider


@pytest.mark.parametrize("provider", ALL)
def test_only_one_call_is_ever_outstanding(machine: Machine, listen, provider: str) -> None:
    machine.order(faults={"slow_s": 0.01})
    notices = listen(MAKERS[provider](machine))
    wait_for_polls(machine, 3)
    machine.order(schedule={})
    notices.get(timeout=60)
    assert machine.counters["outstanding_max"] == 1


@pytest.mark.parametrize("provider", ALL)
def test_what_is_no_payload_of_the_provider_is_reported(machine: Machine, provider: str) -> None:
    machine.order(schedule={}, faults={"body": "<html>captive portal</html>"})
    with pytest.raises(SourceUnavailable):
        MAKERS[provider](machine).poll()


@pytest.mark.parametrize("provider", ALL)
def test_a_dead_service_is_reported(provider: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(SourceUnavailable):
        make_source(provider, f"http://127.0.0.1:{port}", "a").poll()


# --- GCP ------------------------------------------------------------------------------------------------


def test_gcp_hangs_until_something_changes(machine: Machine, listen) -> None:
    notices = listen(gcp(machine, wait_s=600))
    wait_for_polls(machine, 1)
    before = machine.counters["requests"]
    machine.order(schedule={})
    notices.get(timeout=60)  # sooner than the question would have ended by itself
    assert machine.counters["requests"] <= before + 4  # two questions a time
    machine.order(cancel=True)  # lets the next question go


def test_gcp_asks_with_the_last_etag_so_that_no_change_between_two_questions_is_missed(
    machine: Machine,
) -> None:
    source = gcp(machine, wait_s=30)
    assert source.poll() == []
    machine.order(schedule={})
    assert len(source.poll()) == 1


def test_gcp_waits_no_longer_than_it_said(machine: Machine) -> None:
    source = gcp(machine, wait_s=1)
    assert (source.poll(), source.poll()) == ([], [])


def test_gcp_gives_up_on_a_service_that_never_answers(machine: Machine) -> None:
    source = gcp(machine, wait_s=0)
    source.poll()
    source._timeout_s = 0.1  # from here on: a busy machine takes longer for a good answer
    machine.order(faults={"slow_s": 5})
    with pytest.raises(SourceUnavailable, match="no answer"):
        source.poll()


def test_gcp_does_not_hang_after_a_failure(machine: Machine) -> None:
    source = gcp(machine, wait_s=30)
    source.poll()
    machine.order(faults={"status": 503})
    with pytest.raises(SourceUnavailable):
        source.poll()
    machine.order(faults={})
    assert source.poll() == []  # at once, or this test takes half a minute


def test_an_answer_that_is_not_googles_is_not_believed(machine: Machine) -> None:
    machine.order(schedule={}, faults={"unflavoured": True})
    with pytest.raises(SourceUnavailable, match="not from Google"):
        gcp(machine).poll()


def test_gcp_refuses_a_question_without_its_header(machine: Machine) -> None:
    source = gcp(machine)
    assert source._client.call("GET", "/computeMetadata/v1/instance/preempted", {}).status == 403


TERMINATE, MIGRATE = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"


def test_gcp_a_machine_that_is_stopped_for_maintenance_leaves_and_stays_when_it_is_called_off(
    machine: Machine, listen
) -> None:
    cancelled: queue.Queue[Notice] = queue.Queue()
    notices = listen(gcp(machine, wait_s=0), on_cancelled=cancelled.put, cancelled_after_s=0.01)
    machine.order(maintenance=TERMINATE)
    notice = notices.get(timeout=60)
    assert (notice.action, notice.source) == ("terminate", "gcp")
    assert notice.deadline is not None
    assert notice.deadline - datetime.now(UTC) < timedelta(seconds=60)
    wait_for_polls(machine, 6)
    assert notices.empty()
    machine.order(maintenance="NONE")
    assert cancelled.get(timeout=60) == notice


def test_gcp_maintenance_is_heard_at_once_and_hides_no_preemption(machine: Machine) -> None:
    source = gcp(machine, wait_s=30)
    assert source.poll() == []
    machine.order(maintenance=TERMINATE)
    (maintenance,) = source.poll()  # does not hang, or this test takes half a minute
    machine.order(schedule={})
    preempted, again = source.poll()
    assert (preempted.action, again) == ("preempt", maintenance)


def test_gcp_a_machine_that_is_only_moved_stays(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.order(maintenance=MIGRATE)
    source = gcp(machine, wait_s=0)
    with caplog.at_level("INFO"):
        assert (source.poll(), source.poll()) == ([], [])
    assert caplog.text.count("moved for maintenance") == 1


def test_gcp_a_maintenance_that_was_announced_stands_while_it_cannot_be_asked_for(machine: Machine) -> None:
    machine.order(maintenance=TERMINATE)
    source = gcp(machine)
    (notice,) = source.poll()
    machine.order(faults={"status": 503, "times": 1})  # only the first of the two questions
    assert source.poll() == [notice]
    machine.order(maintenance="SOMETHING_NEW", faults={})
    assert source.poll() == [notice]


# --- Azure ----------------------------------------------------------------------------------------------


def test_the_first_call_may_take_long_and_the_later_ones_may_not(machine: Machine) -> None:
    source = azure(machine, timeout_s=0.2, first_timeout_s=20)
    source._own_name = lambda: machine.name  # type: ignore[method-assign]
    machine.order(schedule={}, faults={"slow_first_s": 1})
    assert len(source.poll()) == 1
    machine.order(faults={"slow_first_s": 1})
    with pytest.raises(SourceUnavailable, match="no answer"):
        source.poll()


def test_an_event_of_another_vm_is_not_ours(machine: Machine) -> None:
    machine.order(schedule={}, faults={"foreign": "other-vm"})
    assert azure(machine).poll() == []


def test_our_event_is_found_among_others_in_any_order_and_once(machine: Machine, listen) -> None:
    machine.order(schedule={}, faults={"decoys": 5, "twice": True})
    notices = listen(azure(machine))
    assert notices.get(timeout=60).event == machine.counters["event_id"]
    wait_for_polls(machine, 5)
    assert notices.empty()


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Redeploy", "Reboot"])
def test_what_ends_the_engine_is_a_notice(machine: Machine, kind: str) -> None:
    machine.order(schedule={"type": kind})
    assert [notice.action for notice in azure(machine).poll()] == [kind.lower()]


def test_a_freeze_is_no_notice(machine: Machine) -> None:
    machine.order(schedule={"type": "Freeze"})
    assert azure(machine).poll() == []


def test_a_started_event_has_no_time_and_is_the_same_event(machine: Machine) -> None:
    machine.order(schedule={})
    source = azure(machine)
    (scheduled,) = source.poll()
    source.acknowledge(scheduled)
    (started,) = source.poll()
    assert started.deadline is None
    assert started.key() == scheduled.key()


def test_an_event_is_started_early_when_the_node_is_empty(machine: Machine, listen) -> None:
    machine.order(schedule={})
    listen(azure(machine), is_drained=lambda notice: True)
    for _ in range(2_000):
        if machine.counters["started_events"]:
            break
        time.sleep(0.005)
    wait_for_polls(machine, 3)
    assert machine.counters["started_events"] == [machine.counters["event_id"]]


def test_an_event_that_names_other_vms_too_is_never_started_early(machine: Machine) -> None:
    machine.order(schedule={"resources": [machine.name, "other-vm"]})
    source = azure(machine)
    (notice,) = source.poll()
    source.acknowledge(notice)
    assert machine.counters["started_events"] == []


def test_a_refused_start_is_reported_and_tried_again(machine: Machine, listen) -> None:
    machine.order(schedule={})
    source = azure(machine)
    (notice,) = source.poll()
    machine.order(faults={"status": 503})
    with pytest.raises(SourceUnavailable, match="503"):
        source.acknowledge(notice)
    machine.order(faults={})
    source.acknowledge(notice)
    assert machine.counters["started_events"] == [notice.event]


# --- Alibaba and Tencent --------------------------------------------------------------------------------


def test_alibabas_token_is_renewed_within_the_same_poll(machine: Machine) -> None:
    source = alibaba(machine)
    source.poll()
    machine.order(schedule={}, expire_tokens=True)
    assert len(source.poll()) == 1
    assert machine.counters["tokens_issued"] == 2


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        ("2018-08-18 12:05:33", datetime(2018, 8, 18, 4, 5, 33, tzinfo=UTC)),
        ("2018-08-18 02:05:33", datetime(2018, 8, 17, 18, 5, 33, tzinfo=UTC)),  # the day before
        ("2018-03-25 02:30:00", datetime(2018, 3, 24, 18, 30, tzinfo=UTC)),  # no such hour in Berlin
        ("2018-08-18 12:05:33+08:00", datetime(2018, 8, 18, 4, 5, 33, tzinfo=UTC)),
        ("2018-08-18T04:05:33Z", datetime(2018, 8, 18, 4, 5, 33, tzinfo=UTC)),
    ],
)
def test_tencents_time_is_beijings_unless_it_says_otherwise(
    machine: Machine, told: str, meant: datetime
) -> None:
    machine.order(schedule={}, faults={"body": told})
    (notice,) = tencent(machine).poll()
    assert notice.deadline == meant


def test_alibabas_time_is_utc(machine: Machine) -> None:
    machine.order(schedule={}, faults={"body": "2015-01-05T18:02:00Z"})
    (notice,) = alibaba(machine).poll()
    assert notice.deadline == datetime(2015, 1, 5, 18, 2, tzinfo=UTC)
