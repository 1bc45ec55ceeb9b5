"""A TGI server behind the adapter: continued by text, and told from a node that speaks ids by nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kernel_steer.admission import Resume
from kernel_steer.node.adapter import Adapter
from tests.kernel_steer.adapter_support import choices, ids_of, listen, stream, text_of
from tests.kernel_steer.double_model import ANSWER, SCRIPT, TOKENIZER, byte_tokens
from tests.kernel_steer.engine_double import SCRIPT_TEXT, TOKENIZER_JSON
from tests.kernel_steer.fake_tgi import EOS_ID, FakeTgi
from tests.kernel_steer.front_door import FrontDoor
from tests.kernel_steer.harness import AdmissionDouble
from tests.kernel_steer.test_clients import openai_sync

STREAM = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
ALL = [*SCRIPT, EOS_ID]
PROMPT = TOKENIZER.encode(f"user:hi;{ANSWER}").ids


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(TOKENIZER_JSON)
    return path


@dataclass
class TgiNode:
    """As AdmissionDouble wants its nodes."""

    name: str
    tgi: FakeTgi
    port: int = 0
    resumes: Resume = Resume.IDS


@pytest.fixture
async def nodes(tokenizer: Path) -> AsyncIterator[list[TgiNode]]:
    runners, made = [], []
    for name in "ab":
        tgi = FakeTgi()
        inside, engine_url = await listen(tgi.application())
        adapter = Adapter(engine_url=engine_url, served_model="double", tokenizer=tokenizer, engine="tgi")
        outside, url = await listen(adapter.application())
        runners += [outside, inside]
        made.append(TgiNode(name, tgi, int(url.rpartition(":")[2])))
    yield made
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def http(nodes: list[TgiNode]) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{nodes[0].port}", timeout=aiohttp.ClientTimeout(total=20)
    ) as session:
        yield session


def chat(**extra: Any) -> dict[str, Any]:
    return {"model": "double", "messages": [{"role": "user", "content": "hi"}], **STREAM, **extra}


async def test_it_works(http: aiohttp.ClientSession) -> None:
    events = await stream(http, "/v1/chat/completions", chat(temperature=0))
    assert events[0]["prompt_token_ids"] == PROMPT
    assert ids_of(events) == ALL
    assert text_of(events) == SCRIPT_TEXT
    assert choices(events)[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("count", range(len(ALL)))
async def test_a_prompt_of_ids_goes_on_from_its_text(http: aiohttp.ClientSession, count: int) -> None:
    """Also where it ends inside a character: what is said again of it is swallowed."""
    body = {"model": "double", "prompt": PROMPT + ALL[:count], "max_tokens": 50, **STREAM}
    events = await stream(http, "/v1/completions", body)
    assert choices(events)[0]["prompt_token_ids"] == PROMPT + ALL[:count]
    assert ids_of(events) == ALL[count:]


async def test_a_limit_counts_only_what_is_new(http: aiohttp.ClientSession) -> None:
    inside = 2  # of the first character of several ids
    body = {"model": "double", "prompt": PROMPT + ALL[:inside], "max_tokens": 2, **STREAM}
    events = await stream(http, "/v1/completions", body)
    assert ids_of(events) == ALL[inside : inside + 2]
    assert choices(events)[-1]["finish_reason"] == "length"


async def test_a_character_that_goes_on_in_another_way_is_refused(
    http: aiohttp.ClientSession, nodes: list[TgiNode]
) -> None:
    prompt = PROMPT + byte_tokens("é")[:1]
    async with http.post(
        "/v1/completions", json={"model": "double", "prompt": prompt, "max_tokens": 5}
    ) as response:
        assert response.status == 400
        assert "inside a character" in (await response.json())["error"]["message"]


async def test_parameters_are_said_in_the_servers_words(
    http: aiohttp.ClientSession, nodes: list[TgiNode]
) -> None:
    await stream(http, "/v1/chat/completions", chat(temperature=0, max_tokens=9))
    assert nodes[0].tgi.requests[-1] == {
        "inputs": f"user:hi;{ANSWER}",
        "parameters": {
            "max_new_tokens": 9,
            "details": True,
            "do_sample": False,
            "repetition_penalty": 1.0,
        },
    }
    asked = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "frequency_penalty": 0.5}
    guided = {"response_format": {"type": "json_object"}}
    await stream(http, "/v1/chat/completions", chat(**asked, **guided, max_tokens=9))
    sent = nodes[0].tgi.requests[-1]["parameters"]
    assert (
        asked | {"do_sample": True, "grammar": {"type": "json", "value": {"type": "object"}}}
    ).items() <= sent.items()


@pytest.mark.parametrize(
    "asked", [{"min_p": 0.1}, {"presence_penalty": 1}, {"logit_bias": {"3": 1}}, {"min_tokens": 2}]
)
async def test_what_the_server_does_not_know_is_refused_by_name(
    http: aiohttp.ClientSession, asked: dict[str, Any]
) -> None:
    async with http.post("/v1/chat/completions", json=chat(**asked)) as response:
        assert response.status == 400
        assert next(iter(asked)) in (await response.json())["error"]["message"]


async def test_logprobs_come_with_the_ids(http: aiohttp.ClientSession) -> None:
    events = await stream(http, "/v1/chat/completions", chat(logprobs=True, top_logprobs=2))
    told = [one for choice in choices(events)[1:] for one in choice["logprobs"]["content"]]
    assert [one["logprob"] for one in told] == [-token / 10 for token in ALL]
    assert all(len(one["top_logprobs"]) == 2 for one in told)


@pytest.mark.parametrize("fault", ["cut_after", "end_after", "error_after"])
async def test_a_server_that_dies_in_mid_answer_looks_like_a_node_that_dies(
    http: aiohttp.ClientSession, nodes: list[TgiNode], fault: str
) -> None:
    setattr(nodes[0].tgi, fault, 3)
    async with http.post("/v1/chat/completions", json=chat()) as response:
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_an_overloaded_server_is_a_503_and_no_fault_of_the_request(
    http: aiohttp.ClientSession, nodes: list[TgiNode]
) -> None:
    nodes[0].tgi.overloaded = True
    async with http.post("/v1/chat/completions", json=chat()) as response:
        assert response.status == 503


async def test_its_card_says_what_it_is_and_can(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["owned_by"], card["max_model_len"]) == ("tgi", 4096)
    assert card["capabilities"] == ["guided", "ids", "logprobs"]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12])
async def test_an_answer_survives_the_loss_of_its_server(
    nodes: list[TgiNode], tmp_path: Path, count: int
) -> None:
    nodes[0].tgi.cut_after = count
    admission = AdmissionDouble(nodes)
    with FrontDoor(admission, tmp_path / "gateway") as door:
        heard = await asyncio.to_thread(openai_sync, door)
        (answer,) = await asyncio.to_thread(door.answers, 1)
    assert (heard.text, heard.finish_reason) == (SCRIPT_TEXT, "stop")
    assert (answer.completion_tokens, len(answer.legs)) == (len(ALL), 2)
