"""What a request may ask for beyond plain sampling, and what becomes of it at llama.cpp."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.kernel_steer.adapter_support import (  # noqa: F401
    STREAM,
    chat,
    choices,
    completion,
    engine_fixture,
    http_fixture,
    ids_of,
    stream,
    text_of,
    tokenizer_path_fixture,
    url_fixture,
)
from tests.kernel_steer.fake_llamacpp import EOS, FIRST_BYTE, INSTEAD_OF_EOS, FakeLlamaCpp, byte_ids


async def test_stop_strings_and_ends_count_behind_the_least_number_of_tokens(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script = [1, 2, EOS, 1, 2, 3, EOS]
    events = await stream(http, "/v1/completions", completion(**STREAM, min_tokens=4, stop=["2"]))
    assert ids_of(events) == [1, 2, INSTEAD_OF_EOS, 1, 2]
    assert text_of(events) == " 1 2 9 1 "
    assert [choice["finish_reason"] for choice in choices(events)] == [None, None, None, None, "stop"]
    least, rest = engine.requests
    assert (least["ignore_eos"], least["n_predict"]) == (True, 4)
    assert (rest["ignore_eos"], rest["n_predict"]) == (False, 46)


async def test_a_least_number_that_is_the_most_ends_by_its_length(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script = [EOS] * 9
    asked = STREAM | {"max_tokens": 3, "min_tokens": 3}
    events = await stream(http, "/v1/completions", completion(**asked))
    assert (len(ids_of(events)), choices(events)[-1]["finish_reason"]) == (3, "length")


async def test_a_stop_id_ends_the_answer_and_is_no_text(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    engine.script = [1, 2, 3, 2, 4]
    events = await stream(http, "/v1/completions", completion(**STREAM, stop_token_ids=[2], min_tokens=2))
    assert ids_of(events) == [1, 2, 3, 2]
    assert text_of(events) == " 1 2 3"
    assert (choices(events)[-1]["finish_reason"], choices(events)[-1]["stop_reason"]) == ("stop", 2)
    assert [2, False] in engine.requests[0]["logit_bias"]


# --- logprobs, guided answers, tools --------------------------------------------------------------------


async def test_a_chat_has_logprobs_of_every_id(engine: FakeLlamaCpp, http: aiohttp.ClientSession) -> None:
    engine.script = [1, *byte_ids("é".encode()), 2, EOS]
    events = await stream(http, "/v1/chat/completions", chat(**STREAM, logprobs=True, top_logprobs=2))
    assert ids_of(events) == list(engine.script)
    told = [one for choice in choices(events)[1:] for one in choice["logprobs"]["content"]]
    assert [one["logprob"] for one in told] == [-token / 10 for token in engine.script]
    assert told[0]["top_logprobs"] == [
        {"token": " 1", "logprob": -0.1, "bytes": list(b" 1")},
        {"token": " 2", "logprob": -0.2, "bytes": list(b" 2")},
    ]


async def test_a_completion_has_logprobs_as_parallel_lists(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json=completion(logprobs=1)) as response:
        told = (await response.json())["choices"][0]["logprobs"]
    assert told["tokens"] == [" 1", " 2", " 3", ""]
    assert told["token_logprobs"] == [-0.1, -0.2, -0.3, 0]
    assert told["top_logprobs"][0] == {" 1": -0.1}


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}},
            {"json_schema": {"type": "string"}},
        ),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json_schema": {"type": "null"}}),
        ({"structured_outputs": {"choice": ['a "b"', "c\\"]}}, {"grammar": r'root ::= "a \"b\"" | "c\\"'}),
    ],
)
async def test_what_a_text_must_be_reaches_the_engine(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession, asked: Any, sent: Any
) -> None:
    await stream(http, "/v1/completions", completion(**STREAM, **asked))
    assert sent.items() <= engine.requests[0].items()


async def test_a_guided_answer_is_never_begun_again_in_the_middle(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    """The grammar would start at its root: with logprobs the ids come in one piece, bytes that are no text cut it."""
    engine.script = [1, *byte_ids("é".encode()), EOS]
    guided = {"response_format": {"type": "json_object"}}
    events = await stream(http, "/v1/completions", completion(**STREAM, **guided, logprobs=0))
    assert (ids_of(events), len(engine.requests)) == (list(engine.script), 1)
    engine.script = [1, FIRST_BYTE + 0xF0, 2, *byte_ids("😀".encode()), 3, EOS]
    async with http.post("/v1/completions", json=completion(**STREAM, **guided)) as response:
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_tools_are_described_where_the_template_knows_them(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with http.post("/v1/chat/completions", json=chat(tools=tools)) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "tools")
    engine.knows_tools = True
    async with http.post("/tokenize", json=chat(tools=tools)) as response:
        assert (await response.json())["tokens"] == byte_ids(b"<look>user:hi;")
    async with http.post("/v1/chat/completions", json=chat(tools=tools, return_token_ids=True)) as response:
        assert (await response.json())["prompt_token_ids"] == byte_ids(b"<look>user:hi;")


async def test_the_card_says_what_the_node_is_and_can(
    engine: FakeLlamaCpp, http: aiohttp.ClientSession
) -> None:
    async with http.get("/v1/models") as response:
        (before,) = (await response.json())["data"]
    assert before["capabilities"] == ["guided", "ids", "logprobs", "min_tokens"]
    engine.knows_tools = True
    async with http.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert "tools" in card["capabilities"]
    assert len(card["template_id"]) == 64
