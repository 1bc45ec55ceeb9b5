"""Reading a run of events in one go gives exactly what reading them one by one gives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_steer.resume.chunked import encode_chunk
from kernel_steer.resume.reader import LegReader
from kernel_steer.resume.state import AnswerState

BASE = {"id": "chatcmpl-1", "created": 1764550000, "model": "m"}


def event(
    ids: list[int], text: str, *, chat: bool = True, ascii_json: bool = True, compact: bool = False
) -> bytes:
    words = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, "token_ids": ids, **words, "logprobs": None, "finish_reason": None}
    separators = (",", ":") if compact else None
    document = json.dumps(BASE | {"choices": [choice]}, ensure_ascii=ascii_json, separators=separators)
    return encode_chunk(b"data: " + document.encode() + b"\n\n")


def read(data: bytes, pieces: list[int], *, at_once: bool) -> tuple[LegReader, AnswerState]:
    """Feeds the data in pieces, each that many bytes long (and then the rest)."""
    state = AnswerState()
    reader = LegReader(state.note, on_words=state.note_words if at_once else None)
    for length in pieces:
        reader.feed(data[:length])
        data = data[length:]
    reader.feed(data)
    return reader, state


def assert_the_same(data: bytes, pieces: list[int]) -> LegReader:
    reader, state = read(data, pieces, at_once=True)
    plain_reader, plain_state = read(data, pieces, at_once=False)
    assert state == plain_state
    for name in ("safe", "safe_chunk_rest", "finished", "done", "decoder"):
        assert getattr(reader, name) == getattr(plain_reader, name), name
    assert str(reader.bad) == str(plain_reader.bad)
    return reader


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("compact", [True, False])
def test_a_run_is_read_without_its_documents(monkeypatch, chat, compact):
    events = [event([n, n + 1], f" w\n{n}", chat=chat, compact=compact) for n in range(50)]
    state = AnswerState()
    told = []
    reader = LegReader(lambda one: (told.append(one), state.note(one)), on_words=state.note_words)
    reader.feed(b"".join(events[:2]))
    reader.feed(b"".join(events[2:]))
    assert len(told) == 1
    assert list(state.ids) == [token for n in range(50) for token in (n, n + 1)]
    assert state.text == "".join(f" w\n{n}" for n in range(50))
    assert reader.safe == sum(map(len, events))


ids = st.lists(st.integers(0, 200_000), max_size=3)
events = st.builds(event, ids, st.text(max_size=12), ascii_json=st.booleans())
NASTY = [
    b'"', b"\\", b'\\"', b"\n", b"\r\n", b"\n\n\r\n", b"\1", b"\2", b"\0", b"[", b"],", b"0", b",", b" ",
    b"\xe6", b"\xbc\xa2", b"\\ud83d", b"\\ude00", b"\\u00", b"null", b'"stop"', b'"error":1,', b"f", b"{",
    b'], "delta": {"content": "', b'"}, "logprobs": null, "finish_reason": null}]}\n\n\r\n',
]  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(events, min_size=3, max_size=12), st.data())
def test_whatever_comes_it_is_read_the_same(some, data):
    stream = b"".join(event([7], "start") for _ in range(2)) + b"".join(some)
    first = len(event([7], "start")) * 2
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(first, len(stream)))
        cut = data.draw(st.integers(0, 6))
        stream = stream[:at] + data.draw(st.sampled_from(NASTY)) + stream[at + cut :]
    pieces = [first, *data.draw(st.lists(st.integers(0, 600), max_size=3))]
    assert_the_same(stream, pieces)


def test_two_halves_of_a_character_in_two_events_are_no_json():
    """Together they would be one: a reader that joins strings before it decodes them would take them."""
    half = event([1], "@").replace(b"@", b"\xe6") + event([2], "@@").replace(b"@@", b"\xbc\xa2")
    escaped = event([1], "@@@@@@").replace(b"@@@@@@", rb"\ud83d")
    escaped += event([2], "@@@@@@").replace(b"@@@@@@", rb"\ude00")
    for broken in (half, escaped):
        reader = assert_the_same(event([7], "a") * 2 + broken, [len(event([7], "a")) * 2])
        assert "not JSON" in str(reader.bad)


def test_two_strings_that_are_only_valid_together_are_no_json():
    broken = b"".join(event([1], "@" * n).replace(b"@" * n, b"x\\" if n == 2 else b',"y') for n in (2, 3))
    reader = assert_the_same(event([7], "a") * 2 + broken, [len(event([7], "a")) * 2])
    assert "not JSON" in str(reader.bad)


def test_a_stream_that_changes_its_envelope_is_followed():
    later = [event([n], "b").replace(b"1764550000", b"1764550001") for n in range(20)]
    reader = assert_the_same(
        event([7], "a") * 20 + b"".join(later), [len(event([7], "a")) * k for k in (5, 10)]
    )
    assert reader.bad is None


@pytest.mark.parametrize("nonsense", [b"-1", b"4294967296", b'"7"', b"1.5", b"null"])
def test_ids_that_are_none_end_the_leg_before_any_of_the_event_counts(nonsense):
    broken = event([7, 8], "a").replace(b"[7, 8]", b"[7, %b]" % nonsense)
    size, payload = broken.split(b"\r\n", 1)
    assert size
    reader, state = read(event([7], "a") * 2 + b"%x\r\n%b" % (len(payload) - 2, payload), [], at_once=True)
    assert "no numbers" in str(reader.bad)
    assert list(state.ids) == [7, 7]
    assert reader.safe == 2 * len(event([7], "a"))
