"""Booking what a provider announced."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections

from brokerage import tasks
from brokerage.models import EvictionNotice, Node, Reroute
from brokerage.services.evictions import Booking, book_eviction
from brokerage.services.nodes import mark_draining
from ledger.models import AuditEvent
from tests.brokerage.factories import audit_actions, in_threads, make_node

SIGNAL_AT = datetime(2026, 12, 1, 10, 0, 0, tzinfo=UTC)
DEADLINE = datetime(2026, 12, 1, 10, 2, 30, tzinfo=UTC)


def book(**changes) -> Booking:
    notice = {
        "node": "node-a",
        "epoch": 7,
        "action": "terminate",
        "source": "aws",
        "signal_at": SIGNAL_AT,
        "deadline": DEADLINE,
    }
    return book_eviction(**(notice | changes))


@pytest.mark.django_db
def test_it_works():
    make_node("node-a", state="ready", epoch=7)
    assert book() == Booking(drained=True, noticed=True)
    node = Node.objects.get()
    assert (node.state, node.state_reason) == ("draining", "aws: terminate")
    notice = EvictionNotice.objects.get()
    assert (notice.node, notice.epoch, notice.deadline, notice.signal_at) == (node, 7, DEADLINE, SIGNAL_AT)
    reroute = Reroute.objects.get()
    assert (reroute.node, reroute.epoch, reroute.signal_at, reroute.flipped_at) == (node, 7, SIGNAL_AT, None)
    assert {"node.draining", "node.eviction_notice"} <= set(audit_actions())


@pytest.mark.django_db
def test_a_repeated_notice_with_a_jittering_time_is_kept_once():
    make_node("node-a", state="ready", epoch=7)
    book()
    for jitter_ms in (1, 246, 900):
        moved = timedelta(milliseconds=jitter_ms)
        assert book(signal_at=SIGNAL_AT + moved, deadline=DEADLINE + moved) == Booking(
            drained=False, noticed=False
        )
    assert (EvictionNotice.objects.count(), Reroute.objects.count()) == (1, 1)
    assert Reroute.objects.get().signal_at == SIGNAL_AT


@pytest.mark.django_db
def test_another_action_or_another_minute_is_another_notice():
    make_node("node-a", state="ready", epoch=7)
    book()
    book(action="stop")
    book(deadline=DEADLINE + timedelta(minutes=1))
    assert (EvictionNotice.objects.count(), Reroute.objects.count()) == (3, 1)


@pytest.mark.django_db
def test_a_notice_without_deadline_is_kept():
    make_node("node-a", state="ready", epoch=7)
    book(source="sigterm", deadline=None)
    assert EvictionNotice.objects.get().deadline is None


@pytest.mark.django_db
def test_a_late_notice_leaves_the_next_incarnation_alone():
    make_node("node-a", state="ready", epoch=8)
    book(epoch=7)
    assert Node.objects.get().state == "ready"
    assert Reroute.objects.get().epoch == 7


@pytest.mark.django_db
def test_the_earliest_signal_counts_whoever_reports_first():
    node = make_node("node-a", state="ready", epoch=7)
    flipped = SIGNAL_AT + timedelta(milliseconds=3)
    Reroute.objects.create(
        node=node, epoch=7, signal_at=SIGNAL_AT + timedelta(milliseconds=1), flipped_at=flipped, flows=8
    )
    book()
    reroute = Reroute.objects.get()
    assert (reroute.signal_at, reroute.flipped_at, reroute.flows) == (SIGNAL_AT, flipped, 8)


def test_many_copies_at_once_are_booked_once(fresh_database):
    make_node("node-a", state="ready", epoch=7)
    bookings = in_threads(8, lambda _: book())
    assert sorted((b.drained, b.noticed) for b in bookings)[-1] == (True, True)
    assert sum(b.drained for b in bookings) == sum(b.noticed for b in bookings) == 1
    assert (EvictionNotice.objects.count(), Reroute.objects.count()) == (1, 1)
    assert audit_actions().count("node.draining") == 1
    connections.close_all()


@pytest.mark.django_db
def test_task_takes_times_as_text_and_drops_unknown_nodes(caplog):
    make_node("node-a", state="ready", epoch=7)
    tasks.book_eviction("node-a", 7, "terminate", "aws", SIGNAL_AT.isoformat(), DEADLINE.isoformat())
    assert EvictionNotice.objects.get().deadline == DEADLINE
    tasks.book_eviction("nobody", 7, "terminate", "aws", SIGNAL_AT.isoformat(), None)
    assert "nobody" in caplog.text


# --- cancelled -----------------------------------------------------------------------------------------


def later(seconds: int) -> datetime:
    return SIGNAL_AT + timedelta(seconds=seconds)


def state() -> tuple[str, int]:
    node = Node.objects.get()
    return node.state, node.drained_epoch


@pytest.mark.django_db
def test_a_cancelled_notice_makes_the_node_ready_again():
    make_node("node-a", state="ready", epoch=7)
    book()
    assert book(action="cancel", signal_at=later(9)) == Booking(noticed=True, restored=True)
    assert state() == ("ready", 6)
    assert audit_actions()[-1] == "node.restored"
    assert book(action="cancel", signal_at=later(9)) == Booking()


@pytest.mark.django_db
def test_the_same_notice_after_its_cancellation_drains_again():
    make_node("node-a", state="ready", epoch=7)
    book()
    book(action="cancel", signal_at=later(9))
    assert book(signal_at=later(20)) == Booking(drained=True, noticed=True)
    assert state() == ("draining", 7)
    assert book(action="cancel", signal_at=later(30)).restored


@pytest.mark.django_db
def test_a_cancellation_that_overtakes_its_notice_has_the_last_word():
    make_node("node-a", state="ready", epoch=7)
    book(action="cancel", signal_at=later(9))
    assert book() == Booking(drained=False, noticed=True)
    assert state() == ("ready", 0)


@pytest.mark.django_db
def test_a_cancellation_leaves_the_next_incarnation_alone():
    make_node("node-a", state="ready", epoch=7)
    book()
    Node.objects.update(epoch=8, drained_epoch=8, state_reason="aws: terminate")
    assert not book(action="cancel", signal_at=later(9)).restored
    assert state() == ("draining", 8)


@pytest.mark.django_db
def test_a_node_that_another_source_takes_too_stays_drained():
    make_node("node-a", state="ready", epoch=7)
    book(source="azure", action="preempt")
    book(source="sigterm", signal_at=later(5), deadline=None)
    assert not book(source="azure", action="cancel", signal_at=later(9)).restored
    assert state() == ("draining", 7)


@pytest.mark.django_db
def test_what_staff_drained_stays_drained():
    node = make_node("node-a", state="ready", epoch=7)
    mark_draining(node=node, epoch=7, reason="maintenance", actor="user:clerk")
    book()
    assert not book(action="cancel", signal_at=later(9)).restored
    assert (state(), Node.objects.get().state_reason) == (("draining", 7), "maintenance")


def test_a_notice_and_its_cancellation_at_once_leave_the_node_ready(fresh_database):
    make_node("node-a", state="ready", epoch=7)
    words = [{}, {"action": "cancel", "signal_at": later(9)}] * 4
    in_threads(8, lambda number: book(**words[number]))
    assert state()[0] == "ready"
    assert EvictionNotice.objects.count() == 2
    connections.close_all()


# --- refused signals -----------------------------------------------------------------------------------


@pytest.mark.django_db
def test_refused_signals_are_in_the_audit_trail():
    tasks.record_refused_signals("gateway-1", "forged", "datagram", 3)
    event = AuditEvent.objects.get(action="signal.refused")
    assert (event.object_id, event.after) == (
        "gateway-1",
        {"reason": "forged", "carrier": "datagram", "count": 3},
    )
