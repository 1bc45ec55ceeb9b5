"""An adapter in front of a stand-in for llama.cpp, and ways to ask it: fixtures and functions for the tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import WordLevel

from kernel_steer.node.adapter import Adapter, serve
from tests.kernel_steer.fake_llamacpp import FIRST_BYTE, FakeLlamaCpp


@pytest.fixture(name="tokenizer_path", scope="module")
def tokenizer_path_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = (
        ["<eos>"]
        + [f"▁{number}" for number in range(1, FIRST_BYTE)]
        + [f"<0x{byte:02X}>" for byte in range(256)]
    )
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<eos>"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(name="engine")
async def engine_fixture() -> FakeLlamaCpp:
    return FakeLlamaCpp()


async def listen(application: web.Application) -> tuple[web.AppRunner, str]:
    runner = await serve(application, "127.0.0.1", 0)
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


@pytest.fixture(name="url")
async def url_fixture(engine: FakeLlamaCpp, tokenizer_path: Path) -> AsyncIterator[str]:
    inside, engine_url = await listen(engine.application())
    adapter = Adapter(engine_url=engine_url, served_model="tiny", tokenizer=tokenizer_path, context=100)
    outside, url = await listen(adapter.application())
    yield url
    await outside.cleanup()
    await inside.cleanup()


@pytest.fixture(name="http")
async def http_fixture(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


def chat(**extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **extra}


def completion(**extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [7, 8], "max_tokens": 50, **extra}


STREAM = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}


async def stream(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a whole stream; the last one is the string [DONE]."""
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        raw = await response.text()
    events = raw.split("\n\n")
    assert events.pop() == ""
    return [
        json.loads(data) if (data := event.removeprefix("data: ")) != "[DONE]" else data for event in events
    ]


def choices(events: list[Any]) -> list[dict[str, Any]]:
    return [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]


def ids_of(events: list[Any]) -> list[int]:
    return [token for choice in choices(events) for token in choice.get("token_ids", [])]


def text_of(events: list[Any]) -> str:
    return "".join(
        choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices(events)
    )
