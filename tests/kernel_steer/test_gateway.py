"""The front door over real sockets, with the official client."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from kernel_steer.admission import Outcome
from kernel_steer.engine import EngineChoice
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.http import BODY_BYTES_MAX
from kernel_steer.gateway.server import Connections, listen, recover
from kernel_steer.journal import _AT_DELIVERED, _HEADER_BYTES, _SLOT_BYTES, Journal
from tests.kernel_steer.double_model import CALLS
from tests.kernel_steer.engine_double import PROMPT_IDS, SCRIPT, SCRIPT_TEXT, EngineDouble, Fault
from tests.kernel_steer.harness import AdmissionDouble, Bench

ASK = {"model": "double", "messages": [{"role": "user", "content": "hi"}]}


class Door:
    def __init__(self, bench: Bench, connections: Connections, gateway: Gateway, port: int) -> None:
        self.admission, self.connections, self.gateway, self.port = (
            bench.admission,
            connections,
            gateway,
            port,
        )
        self.journal = bench.journal
        self.client = openai.AsyncOpenAI(
            api_key=bench.admission.key, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=60
        )

    async def raw(self, request: bytes, *, until: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        got = b""
        async with asyncio.timeout(10):
            while data := await reader.read(65536):
                got += data
                if until and got.endswith(until):
                    break
        writer.close()
        return got

    async def post(
        self, body: bytes, *, key: str | None = "apx_test_good", extra: str = ""
    ) -> tuple[int, dict]:
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{authorization}Connection: close\r\n{extra}"
        if "Transfer-Encoding" not in extra:
            head += f"Content-Length: {len(body)}\r\n"
        answer = await self.raw(head.encode() + b"\r\n" + body)
        top, rest = answer.split(b"\r\n\r\n", 1)
        return int(top.split(b" ")[1]), json.loads(rest)


@asynccontextmanager
async def open_door(folder, *doubles, **options):
    bench = Bench(AdmissionDouble(list(doubles)), folder)
    gateway = Gateway(bench.services, bench.journal, EngineChoice(RelayEngine(), "test"), **options)
    listener = listen("127.0.0.1", 0)
    connections = Connections(gateway, listener)
    accepting = asyncio.create_task(connections.accept())
    door = Door(bench, connections, gateway, listener.getsockname()[1])
    try:
        yield door
    finally:
        await door.client.close()
        accepting.cancel()
        listener.close()
        gateway.draining = True
        await connections.drain(2)
        await gateway.settled(2)
        assert bench.journal.in_use == 0, "an answer was never settled"
        bench.close()


@pytest.fixture
async def door(tmp_path):
    async with (
        EngineDouble("a").running() as a,
        EngineDouble("b").running() as b,
        open_door(tmp_path, a, b) as door,
    ):
        yield door


async def test_openai_client_streams_through_the_loss_of_a_node(door):
    door.admission.doubles[0].fault = Fault(cut_at_byte=1500, how="reset")
    stream = await door.client.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == SCRIPT_TEXT
    assert [
        i for c in chunks for choice in c.choices for i in (choice.model_extra or {}).get("token_ids", [])
    ] == SCRIPT
    assert chunks[-1].usage.completion_tokens == len(SCRIPT)
    assert {chunk.id for chunk in chunks} == {"chatcmpl-a"}
    await door.admission.settled.wait()
    [answer] = door.admission.answers
    assert (answer.outcome, answer.completion_tokens, len(answer.legs)) == (Outcome.COMPLETED, len(SCRIPT), 2)


async def test_openai_client_without_streaming(door):
    answer = await door.client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == SCRIPT_TEXT
    assert answer.usage.prompt_tokens == len(PROMPT_IDS)
    await door.admission.settled.wait()
    assert door.admission.answers[0].completion_tokens == len(SCRIPT)


async def test_openai_client_completes_text_and_ids(door):
    door.admission.doubles[0].fault = Fault(cut_at_byte=1500, how="reset")
    stream = await door.client.completions.create(
        model="double", prompt=PROMPT_IDS, max_tokens=50, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == SCRIPT_TEXT
    document = await door.client.completions.create(model="double", prompt=PROMPT_IDS)
    assert (document.object, document.choices[0].text) == ("text_completion", SCRIPT_TEXT)
    assert door.admission.doubles[0].requests[-1][1]["max_tokens"] == 16


@pytest.mark.parametrize("prompt", [None, "", [], ["a"], 5])
async def test_a_wrong_prompt_is_400(door, prompt):
    with pytest.raises(openai.BadRequestError) as caught:
        await door.client.completions.create(model="double", prompt=prompt)
    assert caught.value.param.startswith("prompt")


async def test_openai_client_sees_an_error_when_every_node_is_lost(door):
    for double in door.admission.doubles:
        double.fault = Fault(error_event_after=2)
    with pytest.raises(openai.APIError, match="too many nodes were lost"):
        async for _ in await door.client.chat.completions.create(**ASK, stream=True):
            pass
    await door.admission.settled.wait()
    assert door.admission.answers[0].outcome is Outcome.FAILED


async def test_models(door):
    models = await door.client.models.list()
    assert [model.id for model in models.data] == ["double"]


async def test_one_connection_takes_many_requests_also_pipelined(door):
    body = json.dumps(ASK | {"stream": True}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    last = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await door.raw(request + request + last)
    assert answer.count(b"data: [DONE]") == 2
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert json.loads(answer.rsplit(b"\r\n\r\n", 1)[1])["engine"] == "relay"


async def test_chunked_request_body_and_expect_continue(door):
    body = json.dumps(ASK).encode()
    chunks = b"%x\r\n%b\r\n%x;ext=1\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (5, body[:5], len(body) - 5, body[5:])
    answer = await door.raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
        b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n" + chunks
    )
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


def _ask(*headers: bytes, version: bytes = b"1.1", length: int | None = None) -> bytes:
    body = json.dumps(ASK | {"stream": True}).encode()
    lines = [
        b"POST /v1/chat/completions HTTP/" + version,
        b"Host: x",
        b"Authorization: Bearer apx_test_good",
        b"Content-Length: %d" % (len(body) if length is None else length),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body if length is None else b"")


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.3, IRC/6.9"])
async def test_an_offer_to_upgrade_is_not_taken_up(door, offer):
    """RFC 9110 7.8: a server may ignore it. The connection stays what it is, for more requests."""
    upgrade = _ask(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + offer, b"HTTP2-Settings: AAMAAABk")
    answer = await door.raw(upgrade + _ask(b"Connection: close"))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"upgrade" not in answer.lower()
    assert answer.count(b"data: [DONE]") == 2


async def test_what_is_too_large_is_refused_before_it_is_sent(door):
    answer = await door.raw(_ask(b"Expect: 100-continue", length=5 << 20))
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_an_unknown_expectation_is_417_and_one_of_http_1_0_is_ignored(door):
    assert (await door.raw(_ask(b"Expect: miracles"))).startswith(b"HTTP/1.1 417 ")
    old = await door.raw(_ask(b"Expect: 100-continue", version=b"1.0"))
    assert old.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("key", [None, "apx_test_bad", "nonsense"])
async def test_a_wrong_key_is_401_and_never_echoed(door, key):
    status, body = await door.post(json.dumps(ASK).encode(), key=key)
    assert (status, body["error"]["type"], body["error"]["code"]) == (
        401,
        "authentication_error",
        "invalid_api_key",
    )
    assert key is None or key not in json.dumps(body)


async def test_no_credit_is_402(door):
    door.admission.credit = False
    status, body = await door.post(json.dumps(ASK).encode())
    assert (status, body["error"]["code"]) == (402, "insufficient_quota")
    await door.admission.settled.wait()
    assert len(door.admission.abandoned) == 1


async def test_unknown_model_is_404(door):
    status, body = await door.post(json.dumps(ASK | {"model": "other"}).encode())
    assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "not valid JSON"),
        (b"[]", None, "JSON object"),
        (b'{"model": "double"}', "messages", "Field required"),
        (b'{"model": 5, "messages": [{"role":"user","content":"x"}]}', "model", "valid string"),
        (b'{"model": "double", "messages": []}', "messages", "at least 1"),
        (b'{"model": "double", "messages": [{"role":"user"}]}', "messages.0", "content must be"),
        (b'{"model": "double", "messages": [{"role":"boss","content":"x"}]}', "messages.0.role", "'system'"),
        (b'{"model": "double", "messages": [{"role":"user","content":5}]}', "messages.0.content", "valid"),
        (
            b'{"model": "double", "messages": [{"role":"user","content":"x"}], "max_tokens": "9"}',
            "max_tokens",
            "integer",
        ),
        (
            b'{"model": "double", "messages": [{"role":"user","content":"x"}], "max_tokens": 0}',
            "max_tokens",
            "greater",
        ),
        (
            b'{"model": "double", "messages": [{"role":"user","content":"x"}], "temperature": 9}',
            "temperature",
            "less",
        ),
        (
            b'{"model": "double", "messages": [{"role":"user","content":"x"}], "strem": true}',
            "strem",
            "Unknown parameter",
        ),
        (b'{"model": "double", "messages": [{"role":"user","content":"x"}], "n": 17}', "n", "less"),
        (
            b'{"model": "double", "messages": [{"role":"user","content":"x"}], "stream_options": {}}',
            None,
            "stream: true",
        ),
    ],
)
async def test_bad_input_is_400_that_names_the_field(door, body, param, words):
    status, answer = await door.post(body)
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (
        400,
        "invalid_request_error",
        param,
    )
    assert words in answer["error"]["message"]
    assert not door.admission.doubles[0].requests


async def test_a_body_over_the_limit_is_413_before_it_is_read(door):
    status, body = await door.post(b"", extra=f"Content-Length: {BODY_BYTES_MAX + 1}\r\nX: ")
    assert (status, body["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "head",
    [
        b"NONSENSE\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    ],
)
async def test_smuggling_and_nonsense_are_400_and_the_connection_is_closed(door, head):
    answer = await door.raw(head)
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_unknown_address_and_method(door):
    answer = await door.raw(b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    answer = await door.raw(b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405 ")


async def test_a_client_that_vanishes_is_charged_what_it_got(door):
    a = door.admission.doubles[0]
    a.fault = Fault(pause_after=4)
    body = json.dumps(ASK | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    got = b""
    while got.count(b'"token_ids"') < 4:
        got += await reader.read(65536)
    writer.transport.abort()
    async with asyncio.timeout(30):
        await door.admission.settled.wait()
        while not a.disconnects:
            await asyncio.sleep(0)
    [answer] = door.admission.answers
    assert (answer.outcome, answer.completion_tokens) == (Outcome.CLIENT_GONE, 4)


async def test_draining_finishes_open_answers_and_refuses_new_ones(door):
    a = door.admission.doubles[0]
    a.fault = Fault(pause_after=4)
    stream = await door.client.chat.completions.create(**ASK, stream=True)
    first = await anext(aiter(stream))
    assert first.choices[0].delta.role == "assistant"
    door.gateway.draining = True
    draining = asyncio.ensure_future(door.connections.drain(30))
    a.resume.set()
    rest = [chunk async for chunk in stream]
    assert rest[-1].choices[0].finish_reason == "stop"
    await draining


def _noted_as_delivered(path: Path) -> int:
    """In all slots together, as the file has it; the gateway has the journal itself."""
    raw = path.read_bytes()
    return sum(
        int.from_bytes(raw[base + _AT_DELIVERED :][:8], "little")
        for base in range(_HEADER_BYTES, len(raw), _SLOT_BYTES)
    )


async def test_what_a_killed_gateway_delivered_is_charged_at_the_next_start(tmp_path):
    """The child serves one answer and is killed with -9 in the middle of it."""
    async with EngineDouble("a").running() as a:
        a.fault = Fault(pause_after=5)
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        child = os.fork()
        if child == 0:
            try:
                asyncio.set_event_loop(None)
                asyncio.events._set_running_loop(None)
                asyncio.run(_serve_until_killed(tmp_path, a, listener))
            finally:
                os._exit(1)
        listener.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(ASK | {"stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        got = b""
        while got.count(b'"token_ids"') < 5:
            got += await reader.read(65536)
        told = got.split(b"\r\n\r\n", 1)[1]
        async with asyncio.timeout(30):
            while _noted_as_delivered(tmp_path / "journal") != len(told):  # it is noted just after it is sent
                await asyncio.sleep(0.005)
        os.kill(child, 9)
        os.waitpid(child, 0)
        writer.close()
    journal = Journal(tmp_path / "journal", slots=16)
    admission = AdmissionDouble([])
    await recover(journal, admission)
    [answer] = admission.answers
    assert (answer.outcome, answer.prompt_tokens, answer.completion_tokens) == (
        Outcome.RECOVERED,
        len(PROMPT_IDS),
        5,
    )
    assert answer.record == {"hold": 1}
    assert journal.in_use == 0
    await recover(journal, admission)
    assert len(admission.answers) == 1
    journal.close()


async def _serve_until_killed(folder, double: EngineDouble, listener: socket.socket) -> None:
    bench = Bench(AdmissionDouble([double]), folder)
    gateway = Gateway(bench.services, bench.journal, EngineChoice(RelayEngine(), "test"))
    await Connections(gateway, listener).accept()


async def test_turns_of_a_conversation_are_chosen_for_by_the_same_prefix(door):
    ask, said = door.client.chat.completions.create, {"role": "assistant", "content": "hello"}
    turn = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    await ask(model="double", messages=turn)
    await ask(model="double", messages=[*turn, said, {"role": "user", "content": "and?"}])
    await ask(model="double", messages=[turn[0], {"role": "user", "content": "other"}])
    for messages in (turn, [turn[1]]):
        await ask(model="double", messages=messages, prompt_cache_key="k")
    first, again, other, named, named_too = door.admission.prefixes
    assert first == again
    assert named == named_too
    assert len({first, other, named}) == 3


async def test_openai_client_gets_choices_through_the_loss_of_a_node(door):
    door.admission.doubles[0].fault = Fault(cut_at_byte=1500, how="reset")
    stream = await door.client.chat.completions.create(
        **ASK, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert set(texts.values()) == {SCRIPT_TEXT}
    assert chunk.usage.completion_tokens == 2 * len(SCRIPT)
    document = await door.client.chat.completions.create(**ASK, n=2)
    assert [choice.message.content for choice in document.choices] == [SCRIPT_TEXT] * 2
    await door.gateway.settled(2)
    for answer in door.admission.answers:
        assert (answer.prompt_tokens, answer.completion_tokens) == (len(PROMPT_IDS), 2 * len(SCRIPT))


async def test_openai_client_collects_tool_calls_through_the_loss_of_a_node(door):
    for double in door.admission.doubles:
        double.script = CALLS
    door.admission.doubles[0].fault = Fault(error_event_after=40)
    calls: dict[int, dict[str, str]] = {}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "time")
    ]
    async for chunk in await door.client.chat.completions.create(**ASK, tools=tools, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            call = calls.setdefault(
                delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""}
            )
            assert delta.id in (None, call["id"])
            call["arguments"] += delta.function.arguments or ""
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        ("weather", '{"city":"Köln"}'),
        ("time", "{}"),
    ]
    assert chunk.choices[0].finish_reason == "tool_calls"


async def test_a_circuit_shows_at_healthz(door):
    await door.admission.doubles[0].kill()
    await door.client.chat.completions.create(**ASK)
    health = door.gateway.health()
    assert (health["circuits_open"], health["circuits_opened"]) == (1, 1)
    assert [name for name, _ in door.admission.failed] == ["a"]
