"""The journal keeps what was delivered, whatever kills its writer, and forgets what was settled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_steer.journal import RING_BYTES, Checkpoint, Journal, JournalFull


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def reopen(journal: Journal, path) -> Journal:
    journal.close()
    return Journal(path, slots=4)


def test_it_works(path):
    journal = Journal(path, slots=4)
    slot = journal.open()
    slot.write_record({"request_id": "r1"})
    slot.start_leg(1)
    slot.append(b"abcdef")
    slot.mark_delivered(5)
    slot.save(replace(slot.checkpoint, counted=3, completion_tokens=2, prompt_tokens=7))
    journal = reopen(journal, path)
    [left] = journal.left_behind()
    assert left.record == {"request_id": "r1"}
    assert (left.checkpoint.completion_tokens, left.checkpoint.prompt_tokens) == (2, 7)
    assert left.tail == b"de"
    journal.free(left.slot)
    journal = reopen(journal, path)
    assert not list(journal.left_behind())


def test_a_slot_used_again_remembers_nothing(path):
    journal = Journal(path, slots=1)
    slot = journal.open()
    slot.write_record({"secret": "x" * 100})
    slot.append(b"old")
    slot.mark_delivered(3)
    slot.save(Checkpoint(completion_tokens=9))
    journal.free(slot)
    journal.open()
    journal.close()
    [left] = Journal(path, slots=1).left_behind()
    assert (left.record, left.checkpoint, left.tail) == (None, Checkpoint(), b"")


def test_full_is_said(path):
    journal = Journal(path, slots=2)
    journal.open()
    journal.open()
    with pytest.raises(JournalFull):
        journal.open()
    assert journal.in_use == 2


def test_one_gateway_per_journal(path):
    journal = Journal(path, slots=4)
    with pytest.raises(RuntimeError, match="another running gateway"):
        Journal(path, slots=4)
    journal.close()


def test_another_layout_is_refused_and_left_alone(path):
    Journal(path, slots=4).close()
    raw = path.read_bytes()
    path.write_bytes(b"APJ0" + raw[4:])
    with pytest.raises(RuntimeError, match="another layout"):
        Journal(path, slots=4)
    assert path.read_bytes()[:4] == b"APJ0"


def test_the_number_of_slots_may_change_while_answers_are_left_behind(path):
    journal = Journal(path, slots=2)
    slots = [journal.open(), journal.open()]
    for number, slot in enumerate(slots):
        slot.write_record({"request_id": str(number)})
    journal.close()
    larger = Journal(path, slots=5)
    assert larger.in_use == 2
    larger.close()
    smaller = Journal(path, slots=1)
    assert {left.record["request_id"] for left in smaller.left_behind() if left.record} == {"0", "1"}
    assert smaller.in_use == 2
    smaller.close()


def test_a_record_over_the_limit_is_refused(path):
    with pytest.raises(ValueError, match="at most"):
        Journal(path, slots=1).open().write_record({"x": "y" * 5000})


@given(st.lists(st.tuples(st.integers(1, 9000), st.booleans()), max_size=60))
def test_the_tail_is_always_what_was_delivered_since_the_checkpoint(tmp_path_factory, steps):
    """Against a model that keeps every byte; the ring wraps many times."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path, slots=1)
    slot = journal.open()
    stream, counted = b"", 0
    for number, (size, count) in enumerate(steps):
        piece = bytes([number % 251]) * size
        if len(stream) + size - counted > RING_BYTES:
            counted = len(stream)
            slot.save(replace(slot.checkpoint, counted=counted))
        slot.append(piece)
        stream += piece
        slot.mark_delivered(len(stream))
        if count:
            counted = len(stream)
            slot.save(replace(slot.checkpoint, counted=counted))
    journal.close()
    journal = Journal(path, slots=1)
    [left] = journal.left_behind()
    assert left.tail == stream[counted:]
    journal.close()


def test_an_event_larger_than_the_ring_counts_only_when_it_is_whole(path):
    journal = Journal(path, slots=1)
    slot = journal.open()
    slot.append(b"x" * (RING_BYTES + 1))
    slot.mark_delivered(RING_BYTES + 1)
    assert slot.uncounted() == b""
