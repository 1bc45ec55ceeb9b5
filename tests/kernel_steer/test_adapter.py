"""The adapter at the node's door: vLLM's dialect outside, llama.cpp's inside, and every way to fail."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from kernel_steer.node.adapter import BODY_BYTES_MAX, Adapter
from tests.kernel_steer.adapter_support import (  # noqa: F401
    STREAM,
    chat,
    choices,
    completion,
    engine_fixture,
    http_fixture,
    ids_of,
    listen,
    stream,
    text_of,
    tokenizer_path_fixture,
    url_fixture,
)
from tests.kernel_steer.fake_llamacpp import EOS, FIRST_BYTE, FakeLlamaCpp, byte_ids

# --- the dialect ----------------------------------------------------------------------------------------


async def test_a_chat_streams_as_vllm_does(http: aiohttp.ClientSession) -> None:
    first, *rest = events = await stream(http, "/v1/chat/completions", chat(**STREAM))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["prompt_token_ids"] == byte_ids(b"user:hi;")
    assert [choice["token_ids"] for choice in choices(rest)] == [[1], [2], [3], [EOS]]
    assert text_of(events) == " 1 2 3"
    assert [choice["finish_reason"] for choice in choices(rest)] == [None, None, None, "stop"]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events[:-1]}) == 1


async def test_a_completion_streams_as_vllm_does(http: aiohttp.ClientSession) -> None:
    events = await stream(http, "/v1/completions", completion(**STREAM))
    assert choices(events)[0]["prompt_token_ids"] == [7, 8]
    assert all("prompt_token_ids" not in choice for choice in choices(events)[1:])
    assert ids_of(events) == [1, 2, 3, EOS]
    assert text_of(events) == " 1 2 3"
    assert events[-2]["usage"]["completion_tokens"] == 4


async def test_ids_come_before_the_text_in_the_bytes_of_an_event(http: aiohttp.ClientSession) -> None:
    for path, body in (("/v1/chat/completions", chat(**STREAM)), ("/v1/completions", completion(**STREAM))):
        async with http.post(path, json=body) as response:
            for line in (await response.text()).splitlines():
                if '"token_ids"' in line:
                    text = '"delta"' if "chat" in path else '"text"'
                    assert line.index('"token_ids"') < line.index(text)


async def test_without_being_asked_no_ids_and_no_usage_are_sent(http: aiohttp.ClientSession) -> None:
    events = await stream(http, "/v1/chat/completions", chat(stream=True))
    assert "token_ids" not in json.dumps(events)
    assert "usage" not in json.dumps(events)


async def test_continuous_usage_counts_the_ids_so_far(http: aiohttp.ClientSession) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(http, "/v1/completions", completion(**STREAM | {"stream_options": options}))
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 4, 4]


async def test_answers_without_streaming(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/chat/completions", json=chat(return_token_ids=True)) as response:
        answer = await response.json()
    assert answer["object"] == "chat.completion"
    assert answer["prompt_token_ids"] == byte_ids(b"user:hi;")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": " 1 2 3"}
    assert answer["choices"][0]["token_ids"] == [1, 2, 3, EOS]
    assert answer["choices"][0]["finish_reason"] == "stop"
    async with http.post("/v1/completions", json=completion(prompt="ab")) as response:
        answer = await response.json()
    assert answer["choices"][0]["text"] == " 1 2 3"
    assert answer["usage"]["prompt_tokens"] == 2


async def test_the_limit_comes_with_the_last_token(engine: FakeLlamaCpp, http: aiohttp.ClientSession) -> None:
    engine.script = list(range(1, 60))
    events = await stream(http, "/v1/completions", completion(**STREAM | {"max_tokens": 3}))
    assert [choice["finish_reason"] for choice in choices(events)] == [None, None, "length"]
    assert ids_of(events) == [1, 2, 3]


async def test_a_completion_without_a_limit_is_short_and_a_chat_fills_the_context(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script = [1] * 200
    events = await stream(http, "/v1/completions", {"model": "tiny", "prompt": [7], **STREAM})
    assert len(ids_of(events)) == 16
    engine.requests.clear()
    events = await stream(http, "/v1/chat/completions", chat(**STREAM))
    assert len(ids_of(events)) == 100 - len(b"user:hi;")


async def test_sampling_reaches_the_engine_with_openais_defaults(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    await stream(http, "/v1/completions", completion(stream=True))
    sent = engine.requests[-1]
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "seed": -1}
    assert defaults.items() <= sent.items()
    asked = {"temperature": 0, "top_p": 0.5, "top_k": 9, "min_p": 0.1, "seed": 5, "frequency_penalty": 1.5}
    await stream(
        http, "/v1/completions", completion(stream=True, logit_bias={"4": -100}, ignore_eos=True, **asked)
    )
    sent = engine.requests[-1]
    assert (asked | {"logit_bias": [[4, -100.0]], "ignore_eos": True}).items() <= sent.items()


async def test_small_questions(http: aiohttp.ClientSession) -> None:
    async with http.get("/health") as response:
        assert response.status == 200
    async with http.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 100)
    async with http.post("/tokenize", json={"model": "tiny", "prompt": "ab"}) as response:
        assert await response.json() == {"count": 2, "max_model_len": 100, "tokens": byte_ids(b"ab")}
    async with http.post("/tokenize", json=chat()) as response:
        assert (await response.json())["tokens"] == byte_ids(b"user:hi;")
    async with http.post("/detokenize", json={"tokens": [1, 2]}) as response:
        assert await response.json() == {"prompt": " 1 2"}
    async with http.get("/tokenizer.json") as response:
        assert Tokenizer.from_str(await response.text()).decode([1, 2]) == " 1 2"
        etag = response.headers["ETag"]
    assert etag == f'"{card["tokenizer_id"]}"'
    async with http.get("/tokenizer.json", headers={"If-None-Match": etag}) as response:
        assert response.status == 304


# --- ids that the engine does not send --------------------------------------------------------------------


async def test_ids_inside_a_character_are_spelt_from_its_bytes(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script = [1, *byte_ids("é😀".encode()), 2, EOS]
    events = await stream(http, "/v1/completions", completion(**STREAM))
    assert ids_of(events) == list(engine.script)
    assert text_of(events) == " 1é😀 2"
    assert len(engine.requests) == 1


async def test_bytes_that_are_no_text_are_asked_for_again(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script = [1, FIRST_BYTE + 0xF0, 2, *byte_ids("😀".encode()), 3, EOS]
    events = await stream(http, "/v1/completions", completion(**STREAM))
    assert ids_of(events) == list(engine.script)
    assert text_of(events) == " 1\ufffd 2😀 3"


async def test_a_limit_inside_a_character_still_counts_its_ids(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script = [1, *byte_ids("😀".encode())]
    events = await stream(http, "/v1/completions", completion(**STREAM | {"max_tokens": 3}))
    assert ids_of(events) == list(engine.script[:3])
    assert text_of(events) == " 1"
    assert choices(events)[-1]["finish_reason"] == "length"


async def test_the_end_of_sequence_id_never_comes_without_its_reason(http: aiohttp.ClientSession) -> None:
    for choice in choices(await stream(http, "/v1/completions", completion(**STREAM))):
        assert (EOS in choice["token_ids"]) == (choice["finish_reason"] == "stop")


# --- stop strings -----------------------------------------------------------------------------------------


async def test_a_stop_string_ends_the_answer_and_the_engines_work(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script, engine.hang_after = [1, 2, 3, 4, 5], 3
    events = await stream(http, "/v1/completions", completion(**STREAM, stop=["2 3"]))
    assert text_of(events) == " 1 "
    assert ids_of(events) == [1, 2, 3]
    assert (choices(events)[-1]["finish_reason"], choices(events)[-1]["stop_reason"]) == ("stop", "2 3")


async def test_the_start_of_a_stop_string_at_the_end_is_text(http: aiohttp.ClientSession) -> None:
    events = await stream(http, "/v1/completions", completion(**STREAM, stop=" 3 and more"))
    assert text_of(events) == " 1 2 3"


# --- a node that dies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut_after", "end_after", "error_after"])
@pytest.mark.parametrize("tokens", [1, 2])
async def test_an_engine_that_dies_in_mid_answer_looks_like_a_node_that_dies(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession, fault: str, tokens: int
) -> None:
    setattr(engine, fault, tokens)
    got = b""
    async with http.post("/v1/completions", json=completion(**STREAM)) as response:
        with pytest.raises(aiohttp.ClientError):
            async for chunk in response.content.iter_any():
                got += chunk
    assert b"[DONE]" not in got
    assert b'finish_reason":"' not in got


@pytest.mark.parametrize("fault", ["cut_after", "end_after", "error_after"])
async def test_an_engine_that_dies_before_the_first_token_is_a_503(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession, fault: str
) -> None:
    setattr(engine, fault, 0)
    for body in (completion(**STREAM), completion()):
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == 503


async def test_an_absent_engine_is_a_503_and_an_ill_one_is_not_healthy(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession, tokenizer_path: Path
) -> None:
    engine.healthy = False
    async with http.get("/health") as response:
        assert response.status == 503
    adapter = Adapter(
        engine_url="http://127.0.0.1:9", served_model="tiny", tokenizer=tokenizer_path, context=100
    )
    runner, url = await listen(adapter.application())
    async with http.post(f"{url}/v1/completions", json=completion()) as response:
        assert response.status == 503
    async with http.get(f"{url}/health") as response:
        assert response.status == 503
    await runner.cleanup()


async def test_a_client_that_leaves_aborts_the_engines_work(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script, engine.hang_after = [1, 2, 3], 2
    response = await http.post("/v1/completions", json=completion(**STREAM))
    await response.content.readuntil(b"\n\n")
    response.close()
    await asyncio.wait_for(engine.aborted.wait(), timeout=10)


async def test_a_client_that_leaves_a_plain_answer_aborts_it_too(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.hang_after = 1
    asking = asyncio.create_task(http.post("/v1/completions", json=completion()))
    while not engine.requests:
        await asyncio.sleep(0.005)
    asking.cancel()
    await asyncio.wait_for(engine.aborted.wait(), timeout=10)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1] * 100}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 99}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": True}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
    ],
    ids=str,
)
async def test_bad_input_is_a_400_that_names_the_field(
    http: aiohttp.ClientSession, engine: FakeLlamaCpp, changes: dict[str, Any], field: str
) -> None:
    async with http.post("/v1/completions", json=completion(**changes)) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, 400, field)
    assert field.split(".")[0] in error["message"] or "context length" in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ],
    ids=str,
)
async def test_bad_messages_are_named_by_their_place(
    http: aiohttp.ClientSession, messages: Any, field: str
) -> None:
    async with http.post("/v1/chat/completions", json=chat(messages=messages)) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == field


async def test_text_parts_and_values_that_ask_for_nothing_are_fine(http: aiohttp.ClientSession) -> None:
    harmless = {
        "n": 1,
        "logprobs": False,
        "tools": [],
        "response_format": {"type": "text"},
        "stop": None,
        "seed": None,
    }
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = chat(messages=[{"role": "user", "content": parts}], return_token_ids=True, **harmless)
    async with http.post("/v1/chat/completions", json=body) as response:
        assert (await response.json())["prompt_token_ids"] == byte_ids(b"user:hi;")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": [1], "temperature": NaN}'])
async def test_a_body_that_is_no_json_object_is_a_400(http: aiohttp.ClientSession, body: bytes) -> None:
    async with http.post("/v1/completions", data=body) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]


async def test_other_refusals_keep_the_error_format(
    http: aiohttp.ClientSession, engine: FakeLlamaCpp
) -> None:
    async with http.post("/v1/completions", json=completion(model="huge")) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (404, "model")
    async with http.get("/v1/nothing") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, 404)
    async with http.post("/v1/completions", data=b" " * (BODY_BYTES_MAX + 1)) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, 413)
    engine.refuse_status = 400
    for body in (completion(), completion(**STREAM)):
        async with http.post("/v1/completions", json=body) as response:
            assert (response.status, (await response.json())["error"]["message"]) == (400, "no, thanks")
