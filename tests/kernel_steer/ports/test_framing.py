"""Where messages end, over any segmentation, and what is no message at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_steer.ports.http_framing import (
    HEAD_BYTES_MAX,
    BadMessage,
    Framer,
    Phase,
    read_request_head,
    read_response_head,
)

cuts = st.lists(st.integers(1, 9), min_size=1, max_size=400)


def _feed(framer: Framer, data: bytes, sizes: list[int]) -> int:
    """How many bytes belong to the message, when they come in pieces of these sizes."""
    at = 0
    while at < len(data) and not framer.is_over:
        piece = data[at : at + sizes[at % len(sizes)]]
        used = framer.feed(piece)
        assert used == len(piece) or framer.is_over
        at += used
    return at


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=12), rest=st.binary(max_size=30), sizes=cuts
)
def test_chunks(pieces: list[bytes], rest: bytes, sizes: list[int]):
    body = (
        b"".join(b"%X;x=y\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: t\r\n\r\n"
    )
    framer = Framer(Phase.CHUNK_SIZE)
    assert _feed(framer, body + rest, sizes) == len(body)
    assert framer.is_over


@given(count=st.integers(1, 300), more=st.integers(0, 20), sizes=cuts)
def test_counted_bytes(count: int, more: int, sizes: list[int]):
    framer = Framer(Phase.COUNTED, count)
    assert _feed(framer, b"x" * (count + more), sizes) == count
    assert framer.is_over


@pytest.mark.parametrize(
    "bad", [b"g\r\n", b"\r\n", b"5\n", b"5\r\nhello!", b"5;x\nhello", b"0\r\n\rx", b"f" * 17]
)
def test_bad_chunks(bad: bytes):
    with pytest.raises(BadMessage):
        Framer(Phase.CHUNK_SIZE).feed(bad)


@pytest.mark.parametrize(
    ("head", "method", "phase", "left", "alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", b"GET", Phase.COUNTED, 7, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length:7\r\n\r\n", b"HEAD", Phase.BOUNDARY, 0, True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"POST", Phase.BOUNDARY, 0, True),
        (b"HTTP/1.1 200\r\nTransfer-Encoding: Chunked\r\n\r\n", b"GET", Phase.CHUNK_SIZE, 0, True),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"GET", Phase.UNTIL_CLOSE, 0, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\n", b"GET", Phase.COUNTED, 7, False),
        (
            b"HTTP/1.1 200 OK\r\nConnection: x, close\r\nContent-Length: 7\r\n\r\n",
            b"",
            Phase.COUNTED,
            7,
            False,
        ),
        (b"HTTP/1.1 101 Switching\r\n\r\n", b"GET", Phase.TUNNEL, 0, True),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"CONNECT", Phase.TUNNEL, 0, True),
    ],
)
def test_responses(head: bytes, method: bytes, phase: Phase, left: int, alive: bool):
    assert read_response_head(head[:-1], method) is None
    found = read_response_head(head + b"body", method)
    assert found is not None
    assert (found.length, found.body, found.keep_alive) == (len(head), Framer(phase, left), alive)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\n b\r\n\r\n",
        b"GET / HTTP/1.1\r\nX : a\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * HEAD_BYTES_MAX,
    ],
)
def test_what_cannot_be_framed_without_doubt_is_refused(head: bytes):
    with pytest.raises(BadMessage):
        read_request_head(head)


def test_only_a_bare_get_or_head_may_be_sent_twice():
    def may(head: bytes) -> bool:
        found = read_request_head(head + b"\r\n")
        assert found is not None
        return found.may_be_sent_twice

    assert may(b"GET / HTTP/1.1\r\nHost: x\r\n")
    assert may(b"HEAD / HTTP/1.1\r\nContent-Length: 0\r\n")
    assert not may(b"GET / HTTP/1.1\r\nContent-Length: 1\r\n")
    assert not may(b"POST / HTTP/1.1\r\n")
