"""Completing what was half-said: framing against httptools, events against a JSON parser."""

from __future__ import annotations

import json

import httptools
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_steer.engine.base import BadLeg
from kernel_steer.resume.chunked import LAST_CHUNK, ChunkedDecoder, Phase, encode_chunk
from kernel_steer.resume.joint import CannotComplete, Joint, complete_event, encode_event

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
documents = st.dictionaries(
    st.text(),
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    min_size=1,
    max_size=4,
)


@given(begun=documents, wanted=documents, data=st.data(), ascii_only=st.booleans())
def test_any_begun_event_can_be_made_to_mean_another(begun, wanted, data, ascii_only):
    said = b"data: " + json.dumps(begun, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    cut = data.draw(st.integers(1, len(said) - 1))
    whole = said[:cut] + complete_event(said[:cut], wanted)
    assert whole.endswith(b"\n\n")
    payload = whole[6:].strip(b"\n")
    assert b"\n" not in payload
    result = orjson.loads(payload)
    assert {name: result[name] for name in wanted} == wanted
    assert json.loads(payload)


@given(wanted=documents, data=st.data())
def test_the_same_event_is_completed_to_the_same_bytes(wanted, data):
    whole = encode_event(wanted)
    cut = data.draw(st.integers(1, len(whole) - 1))
    assert whole[:cut] + complete_event(whole[:cut], wanted) == whole


def test_what_is_no_object_cannot_be_completed():
    with pytest.raises(CannotComplete):
        complete_event(b"data: [DO", {"a": 1})


@given(
    pieces=st.lists(
        st.binary(min_size=1, max_size=300).map(lambda b: b.replace(b"\n", b".").replace(b"\r", b".")),
        min_size=1,
        max_size=5,
    ),
    rest=st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    data=st.data(),
)
def test_a_cut_body_is_completed_to_valid_chunks(pieces, rest, data):
    """httptools reads back exactly: what was delivered, then what was framed, then the end."""
    whole = b"".join(encode_chunk(piece) for piece in pieces)
    cut = data.draw(st.integers(0, len(whole)))
    joint = Joint.after(decoder=ChunkedDecoder(), delivered_since=whole[:cut])
    delivered = joint.begun
    out = whole[:cut] + b"".join(joint.frame(piece) for piece in rest) + joint.last_chunk()
    body = _read_with_httptools(out)
    filler = body[len(delivered) + sum(map(len, rest)) :]
    assert body[: len(delivered)] == delivered
    assert body[len(delivered) :].startswith(b"".join(rest))
    assert not filler.strip(b"\n")


def _read_with_httptools(raw: bytes) -> bytes:
    class Protocol:
        body, complete = b"", False

        def on_body(self, data: bytes) -> None:
            self.body += data

        def on_message_complete(self) -> None:
            self.complete = True

    protocol = Protocol()
    parser = httptools.HttpResponseParser(protocol)
    parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + raw)
    assert protocol.complete
    return protocol.body


@given(pieces=st.lists(st.binary(min_size=1, max_size=200), max_size=5), cuts=st.lists(st.integers(0, 2000)))
def test_decoder_gives_the_payload_at_any_segmentation(pieces, cuts):
    raw = b"".join(encode_chunk(piece) for piece in pieces) + LAST_CHUNK
    decoder, out, start = ChunkedDecoder(), b"", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(raw)), len(raw)]:
        out += b"".join(piece.payload for piece in decoder.feed(raw[start:cut]))
        start = cut
    assert out == b"".join(pieces)
    assert decoder.phase is Phase.END
    assert decoder.position == len(raw)


@pytest.mark.parametrize("raw", [b"zz\r\n", b"\r\n", b"5\r\nabcdeX", b"123456789\r\n", b"0\r\n\r\nmore"])
def test_what_is_not_chunked_is_refused(raw):
    with pytest.raises(BadLeg):
        list(ChunkedDecoder().feed(raw + b"x" * 10))


def test_the_end_itself_may_be_cut():
    for cut in range(len(LAST_CHUNK) + 1):
        joint = Joint.after(decoder=ChunkedDecoder(), delivered_since=LAST_CHUNK[:cut])
        assert _read_with_httptools(LAST_CHUNK[:cut] + joint.last_chunk()) == b"" or cut == 1
