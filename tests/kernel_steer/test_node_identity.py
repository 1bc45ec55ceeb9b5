"""What a node says it is: asked of the running engine, and of the files that it was started with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kernel_steer import tokenizer_shelf
from kernel_steer.admission import Resume
from kernel_steer.node.identity import (
    Engine,
    Identity,
    IdentityUnknown,
    find_tokenizer,
    identify,
    template_id,
)
from kernel_steer.node.revision import revision_of
from kernel_steer.resume.tokens import TokenizerStore, TokenizerUnavailable
from tests.kernel_steer.engine_double import TOKENIZER, TOKENIZER_ID, TOKENIZER_JSON
from tests.kernel_steer.fake_vllm import FakeVllm


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    (folder / "config.json").write_text('{"layers": 4}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4_000)
    return folder


@pytest.fixture
def vllm(model: Path) -> Iterator[FakeVllm]:
    with FakeVllm(model).running() as fake:
        yield fake


def ask(fake: FakeVllm, **settings: str) -> Identity:
    return identify(Engine("127.0.0.1", fake.port), model="tiny", **settings)


def test_a_plain_vllm_is_known_by_its_answers_and_files(vllm: FakeVllm, model: Path) -> None:
    found = ask(vllm)
    assert (found.engine, found.tokenizer_id) == ("vllm 0.32.0", TOKENIZER_ID)
    assert (found.revision, found.tokenizer) == (revision_of(model), model / "tokenizer.json")
    assert "ids" in found.capabilities
    assert found.template_id
    assert ask(vllm) == found


def test_another_template_is_another_identity_and_another_day_is_not(vllm: FakeVllm) -> None:
    vllm.template = "Today is Tue 01 Dec 2026. {role}: {content}\n"
    before = ask(vllm).template_id
    vllm.template = "Today is Wed 02 Dec 2026. {role}: {content}\n"
    assert ask(vllm).template_id == before
    vllm.template = "Today is Wed 02 Dec 2026. {role} - {content}\n"
    assert ask(vllm).template_id != before
    assert template_id("20 May 2025 a") == template_id("1 June 2026 a") != template_id("1 June 2026 b")


def test_a_model_without_a_template_serves_completions(vllm: FakeVllm) -> None:
    vllm.template = None
    assert ask(vllm).template_id == ""


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_engine_that_parts_thoughts_from_the_answer_is_known_before_its_first_request(vllm, name) -> None:
    assert "reasoning" not in ask(vllm).capabilities
    vllm.thinks_as = name
    assert "reasoning" in ask(vllm).capabilities


def test_staff_may_declare_a_model_that_does_not_think_about_a_greeting(vllm: FakeVllm) -> None:
    found = identify(Engine("127.0.0.1", vllm.port), model="tiny", reasoning=True)
    assert "reasoning" in found.capabilities


def test_a_server_that_staff_declare_to_have_no_ids_is_asked_for_none(vllm: FakeVllm) -> None:
    vllm.owned_by = "somebody"
    found = identify(Engine("127.0.0.1", vllm.port), model="tiny", resume=Resume.TEXT)
    assert (found.engine, found.tokenizer_id, found.capabilities) == ("somebody", "", {"text"})
    assert vllm.asked == ["/v1/models"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"names_ids": False}, "name no token ids"),
        ({"keeps_ids": False}, "does not read a prompt of ids as it is given"),
        ({"owned_by": "mystery"}, "'mystery' is none of sglang, vllm"),
        ({"model": "other"}, "it serves 'other', not 'tiny'"),
        (
            {"root": Path("/nowhere")},
            "no tokenizer.json for '/nowhere' on this machine: set APEX_NODE_TOKENIZER",
        ),
    ],
)
def test_what_cannot_be_resumed_is_named(vllm: FakeVllm, fault: dict, words: str) -> None:
    for name, value in fault.items():
        setattr(vllm, name, value)
    with pytest.raises(IdentityUnknown, match=words):
        ask(vllm)


def test_a_tokenizer_that_is_not_the_engines_is_noticed(vllm: FakeVllm, tmp_path: Path) -> None:
    changed = json.loads(TOKENIZER_JSON)
    words = changed["model"]["vocab"]
    words["<0x41>"], words["<0x48>"] = words["<0x48>"], words["<0x41>"]
    vllm.reads_as = tmp_path / "other.json"
    vllm.reads_as.write_text(json.dumps(changed))
    with pytest.raises(IdentityUnknown, match="is not the tokenizer of the running engine"):
        ask(vllm)


def test_a_tokenizer_is_found_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--org--some.model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert find_tokenizer("org/some.model") == snapshot / "tokenizer.json"
    assert revision_of(snapshot) == commit
    with pytest.raises(IdentityUnknown, match="'org/another'"):
        find_tokenizer("org/another")


def test_a_revision_is_of_the_contents_and_not_of_the_names(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, new in (("config.json", "config.json"), ("model.safetensors", "weights-1-of-1.safetensors")):
        (copy / new).write_bytes((model / name).read_bytes())
    assert revision_of(copy) == revision_of(model)
    weights = bytearray((copy / "weights-1-of-1.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "weights-1-of-1.safetensors").write_bytes(weights)
    assert revision_of(copy) != revision_of(model)


async def test_a_gateway_takes_from_the_shelf_what_no_node_hands_out(
    redis_client: redis.Redis, valkey_server, model: Path, tmp_path: Path, vllm: FakeVllm
) -> None:
    shelf = tokenizer_shelf.shelf_in(valkey_server.url)
    sources = [f"http://127.0.0.1:{vllm.port}"]
    with pytest.raises(TokenizerUnavailable):
        await TokenizerStore(tmp_path / "a", shelf).get(TOKENIZER_ID, sources)
    with redis.Redis.from_url(valkey_server.url) as client:
        assert tokenizer_shelf.put(client, TOKENIZER_ID, model / "tokenizer.json")
        assert not tokenizer_shelf.put(client, TOKENIZER_ID, model / "tokenizer.json"), "it was there"
        found = await TokenizerStore(tmp_path / "b", shelf).get(TOKENIZER_ID, sources)
        ids = TOKENIZER.encode("hi").ids
        assert found.decode(ids) == "hi"
        # Who else writes there is not believed.
        client.set(tokenizer_shelf.KEY.format(TOKENIZER_ID), b"nonsense")
    with pytest.raises(TokenizerUnavailable):
        await TokenizerStore(tmp_path / "c", shelf).get(TOKENIZER_ID, sources)


def test_a_shelf_that_is_away_has_nothing() -> None:
    assert asyncio.run(tokenizer_shelf.shelf_in("redis://127.0.0.1:9/0")("a" * 64)) is None
