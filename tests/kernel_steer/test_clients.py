"""What customers really use, streaming through the loss of a node: none of them may notice.

Each asks twice, once undisturbed and once with the node cut off in mid-answer, and must have got the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kernel_steer.engine_double import PROMPT_IDS, SCRIPT, SCRIPT_TEXT, EngineDouble, Fault
from tests.kernel_steer.front_door import FrontDoor
from tests.kernel_steer.harness import AdmissionDouble

MESSAGES = [{"role": "user", "content": "hi"}]
# In mid-event, after some six of the answer's tokens.
CUT = Fault(cut_at_byte=1500, how="reset")


@dataclass(frozen=True)
class Heard:
    """What the customer's program has in its hands at the end."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


ALL = Heard(SCRIPT_TEXT, "stop", len(PROMPT_IDS), len(SCRIPT))


@pytest.fixture
def door(tmp_path: Path) -> Iterator[FrontDoor]:
    doubles = [EngineDouble("a"), EngineDouble("b")]
    with FrontDoor(AdmissionDouble(doubles), tmp_path, doubles=doubles) as door:
        yield door


def openai_sync(door: FrontDoor) -> Heard:
    with openai.OpenAI(api_key=door.admission.key, base_url=f"{door.url}/v1", max_retries=0) as client:
        return _of_openai(
            list(
                client.chat.completions.create(
                    model="double", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
                )
            )
        )


def openai_async(door: FrontDoor) -> Heard:
    async def ask() -> Heard:
        async with openai.AsyncOpenAI(
            api_key=door.admission.key, base_url=f"{door.url}/v1", max_retries=0
        ) as client:
            stream = await client.chat.completions.create(
                model="double", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            return _of_openai([chunk async for chunk in stream])

    return asyncio.run(ask())


def _of_openai(chunks: list[Any]) -> Heard:
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    (reason,) = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    text = "".join(choice.delta.content or "" for choice in choices)
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    return Heard(text, reason, usage.prompt_tokens, usage.completion_tokens)


def openai_without_streaming(door: FrontDoor) -> Heard:
    with openai.OpenAI(api_key=door.admission.key, base_url=f"{door.url}/v1", max_retries=0) as client:
        answer = client.chat.completions.create(model="double", messages=MESSAGES)
    choice, usage = answer.choices[0], answer.usage
    return Heard(choice.message.content, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens)


def langchain(door: FrontDoor) -> Heard:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="double",
        api_key=door.admission.key,
        base_url=f"{door.url}/v1",
        max_retries=0,
        stream_usage=True,
    )
    whole = None
    for chunk in model.stream("hi"):
        whole = chunk if whole is None else whole + chunk
    return Heard(
        whole.text,
        whole.response_metadata["finish_reason"],
        whole.usage_metadata["input_tokens"],
        whole.usage_metadata["output_tokens"],
    )


def litellm_client(door: FrontDoor) -> Heard:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import waits for one from the network
    import litellm

    stream = litellm.completion(
        model="openai/double",
        messages=MESSAGES,
        api_key=door.admission.key,
        api_base=f"{door.url}/v1",
        stream=True,
        stream_options={"include_usage": True},
        num_retries=0,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasons = {c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason}
    (reason,) = reasons
    usage = next(c.usage for c in reversed(chunks) if getattr(c, "usage", None))
    return Heard(text, reason, usage.prompt_tokens, usage.completion_tokens)


def curl(door: FrontDoor) -> Heard:
    body = {
        "model": "double",
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    command = ["curl", "--silent", "--show-error", "--fail", "--no-buffer", f"{door.url}/v1/chat/completions"]
    command += ["-H", f"Authorization: Bearer {door.admission.key}", "-H", "Content-Type: application/json"]
    done = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, check=True, timeout=20)
    events = [line[6:] for line in done.stdout.decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return _of_openai([openai.types.chat.ChatCompletionChunk.model_validate_json(event) for event in events])


CLIENTS = [openai_sync, openai_async, openai_without_streaming, langchain, litellm_client]
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@pytest.mark.parametrize(
    "ask", [*CLIENTS, pytest.param(curl, marks=needs_curl)], ids=lambda ask: ask.__name__
)
def test_a_client_does_not_notice_the_loss_of_a_node(
    door: FrontDoor, ask: Callable[[FrontDoor], Heard]
) -> None:
    assert ask(door) == ALL
    door.admission.doubles[0].fault = CUT
    assert ask(door) == ALL
    undisturbed, resumed = door.answers(2)
    assert (len(undisturbed.legs), len(resumed.legs)) == (1, 2)
    assert resumed.completion_tokens == undisturbed.completion_tokens == len(SCRIPT)


@pytest.mark.parametrize(
    "ask", [openai_sync, openai_async, langchain, litellm_client], ids=lambda ask: ask.__name__
)
def test_a_client_is_told_when_no_node_can_go_on(door: FrontDoor, ask: Callable[[FrontDoor], Heard]) -> None:
    """An answer that stops half-way must never look like a whole one."""
    for double in door.admission.doubles:
        double.fault = Fault(error_event_after=2)
    with pytest.raises(Exception, match=r"no node|node"):
        ask(door)
