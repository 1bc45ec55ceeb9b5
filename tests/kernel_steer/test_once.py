"""The same Idempotency-Key: one answer, one charge, however often the request is sent."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import pytest

from kernel_steer.admission import Outcome, Refusal
from kernel_steer.gateway.audience import Audience
from kernel_steer.resume.sink import ClientGone
from tests.kernel_steer.engine_double import SCRIPT, SCRIPT_TEXT, EngineDouble, Fault
from tests.kernel_steer.harness import read_told
from tests.kernel_steer.test_gateway import ASK, open_door

STREAM = ASK | {"stream": True}
OVER = b"0\r\n\r\n"


@pytest.fixture
async def door(tmp_path):
    async with (
        EngineDouble("a").running() as a,
        EngineDouble("b").running() as b,
        open_door(tmp_path, a, b, retry_grace_s=5.0) as door,
    ):
        yield door


def request(body: dict, key: str = "k-1", path: str = "chat/completions", *, close: bool = True) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
    head += f"Idempotency-Key: {key}\r\nContent-Length: {len(raw)}\r\n"
    return head.encode() + (b"Connection: close\r\n" if close else b"") + b"\r\n" + raw


async def ask(door, body: dict, key: str = "k-1", **options) -> bytes:
    return await door.raw(request(body, key, **options), until=OVER if body.get("stream") else b"")


async def eventually(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def body_of(answer: bytes) -> bytes:
    return answer.split(b"\r\n\r\n", 1)[1]


def error_of(answer: bytes) -> tuple[int, str]:
    return int(answer.split(b" ")[1]), json.loads(body_of(answer))["error"]["code"]


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        (STREAM | {"stream_options": {"include_usage": True}}, "chat/completions"),
        (ASK, "chat/completions"),
        ({"model": "double", "prompt": "hi", "stream": True, "max_tokens": 50}, "completions"),
        ({"model": "double", "prompt": "hi"}, "completions"),
    ],
    ids=["chat-streamed", "chat", "completion-streamed", "completion"],
)
async def test_a_repeated_request_gets_the_stored_answer_and_is_charged_once(door, asked, path):
    if path == "completions":
        asked = asked | {"prompt": [2 + byte for byte in b"hi"] + [1]}
    first = await ask(door, asked, path=path)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"idempotent-replayed" not in first
    await eventually(lambda: door.admission.kept)
    again = await ask(door, asked, path=path)
    assert body_of(again) == body_of(first)
    assert b"\r\nidempotent-replayed: true\r\n" in again
    assert len(door.admission.answers) == 1
    assert len(door.admission.doubles[0].requests) == 1


async def test_what_is_told_under_a_key_is_what_is_told_without(door):
    plain = read_told(await door.raw(request(STREAM).replace(b"Idempotency-Key", b"X-Other"), until=OVER))
    told = read_told(await ask(door, STREAM))
    assert (told.ids, told.text, told.dones) == (plain.ids, plain.text, 1) == (SCRIPT, SCRIPT_TEXT, 1)


async def test_the_spelling_of_json_and_quotes_around_the_key_make_no_other_request(door):
    first = await ask(door, ASK, "k")
    await eventually(lambda: door.admission.kept)
    again = await ask(door, dict(reversed(ASK.items())), '"k"')
    assert body_of(again) == body_of(first)


async def test_a_repetition_joins_an_answer_under_way(door):
    a = door.admission.doubles[0]
    a.fault = Fault(pause_after=4)
    first = asyncio.ensure_future(ask(door, STREAM))
    await eventually(lambda: a.paused)
    second = asyncio.ensure_future(ask(door, STREAM))
    other = await ask(door, STREAM | {"temperature": 0})
    assert error_of(other) == (422, "idempotency_key_reused")
    a.resume.set()
    assert await first == await second
    assert read_told(await first).ids == SCRIPT
    await door.admission.settled.wait()
    assert [answer.completion_tokens for answer in door.admission.answers] == [len(SCRIPT)]


async def test_a_client_that_comes_back_finds_its_answer_going_on(door):
    a = door.admission.doubles[0]
    a.fault = Fault(pause_after=4)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(request(STREAM))
    got = b""
    while got.count(b'"token_ids"') < 4:
        got += await reader.read(65536)
    writer.transport.abort()
    second = asyncio.ensure_future(ask(door, STREAM))
    a.resume.set()
    assert read_told(await second).ids == SCRIPT
    assert (await second).startswith(got)
    await door.admission.settled.wait()
    [answer] = door.admission.answers
    assert (answer.outcome, answer.completion_tokens) == (Outcome.COMPLETED, len(SCRIPT))


async def test_without_anybody_left_the_node_is_let_go_and_what_was_delivered_is_charged(tmp_path):
    async with EngineDouble("a").running() as a, open_door(tmp_path, a, retry_grace_s=0.0) as door:
        a.fault = Fault(pause_after=4)
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(request(STREAM))
        got = b""
        while got.count(b'"token_ids"') < 4:
            got += await reader.read(65536)
        writer.transport.abort()
        await eventually(lambda: a.disconnects and door.admission.answers and not door.admission.begun)
        [lost] = door.admission.answers
        assert (lost.outcome, lost.completion_tokens) == (Outcome.CLIENT_GONE, 4)
        a.fault = Fault()
        assert read_told(await ask(door, STREAM)).ids == SCRIPT  # the key is free for a new answer


async def test_a_loss_of_a_node_is_told_to_all_who_listen(door):
    a = door.admission.doubles[0]
    a.fault = Fault(cut_at_byte=1500, how="reset")
    both = await asyncio.gather(ask(door, STREAM), ask(door, STREAM))
    assert both[0] == both[1]
    assert read_told(both[0]).ids == SCRIPT


async def test_a_refused_request_leaves_its_key_free(door):
    door.admission.credit = False
    both = await asyncio.gather(ask(door, ASK), ask(door, ASK))
    assert {error_of(answer) for answer in both} == {(402, "insufficient_quota")}
    await eventually(lambda: not door.admission.begun)
    door.admission.credit = True
    assert json.loads(body_of(await ask(door, ASK)))["choices"][0]["message"]["content"] == SCRIPT_TEXT


async def test_an_answer_that_failed_is_not_stored(door):
    for double in door.admission.doubles:
        double.fault = Fault(error_event_after=2)
    assert read_told(await ask(door, STREAM)).errors
    await eventually(lambda: not door.admission.begun)
    assert not door.admission.kept


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9", '""'])
async def test_a_malformed_key_is_400(door, key):
    assert error_of(await ask(door, ASK, key)) == (400, "idempotency_key_malformed")


async def test_a_connection_goes_on_after_a_shared_answer(door):
    twice = request(STREAM, close=False) + request(STREAM, close=False)
    last = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await door.raw(twice + last)
    assert answer.count(b"data: [DONE]") == 2
    assert answer.count(b"HTTP/1.1 200 OK") == 3


def narrow_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return ours, theirs


@asynccontextmanager
async def listening(audience: Audience):
    """A listener that reads nothing by itself, and what it will have heard."""
    ours, theirs = narrow_pair()
    hearing = asyncio.ensure_future(audience.attend(ours))
    await asyncio.sleep(0)
    yield theirs, hearing
    hearing.cancel()
    await asyncio.wait([hearing])
    ours.close()
    theirs.close()


async def read_from(sock: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        got += await asyncio.get_running_loop().sock_recv(sock, 65536)
    return got


async def test_one_slow_listener_does_not_hold_up_another():
    audience, said = Audience(keep_bytes_max=1 << 20, patience_s=lambda: 5), bytes(range(256)) * 1024
    async with listening(audience) as (slow, slow_hears), listening(audience) as (quick, quick_hears):
        reading = asyncio.ensure_future(read_from(quick, len(said)))
        await audience.say(said)
        audience.close()
        assert await reading == said
        assert await quick_hears
        assert not slow_hears.done()
        assert await read_from(slow, len(said)) == said
        assert await slow_hears


async def test_an_answer_over_the_limit_is_told_once_and_not_stored():
    audience, piece = Audience(keep_bytes_max=1000, patience_s=lambda: 5), b"x" * 800
    async with listening(audience) as (sock, hears), listening(audience) as (_, lags):
        for _ in range(3):
            await audience.say(piece)
        assert len(audience.said) <= 1000
        assert not audience.is_whole
        with pytest.raises(Refusal, match="too long") as caught:
            await audience.attend(sock)
        assert (caught.value.status, caught.value.retry_after_s) == (409, 5)
        audience.close()
        assert await read_from(sock, 2400) == piece * 3
        assert await hears
        assert await lags


async def test_nobody_listening_for_too_long_ends_the_answer():
    audience = Audience(keep_bytes_max=1000, patience_s=lambda: 0.01)
    told: list[bool] = []
    audience.listen(lambda: told.append(audience.gone))
    async with listening(audience) as (sock, _):
        await audience.say(b"a")
        sock.close()
        with pytest.raises(ClientGone):
            await audience.say(b"b" * 100_000)
    assert told == [True]
