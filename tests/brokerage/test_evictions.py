"""Booking what a provider announced."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections

from brokerage import tasks
from brokerage.models import EvictionNotice, Node, Reroute
from brokerage.services.evictions import Booking, book_eviction
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
