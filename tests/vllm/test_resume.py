"""Answers of real vLLM servers that are cut, compared id by id with uninterrupted ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kernel_steer.admission import Outcome
from tests.vllm.pool import Heard, Pool
from tests.vllm.servers import VllmServer

SEED = random.randrange(1 << 32)
TOKENS = 120


def chat(words: str, **parameters: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": TOKENS,
        "temperature": 0,
        **parameters,
    }


# A guided answer of noise must come to an end by its schema.
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "list",
        "schema": {
            "type": "array", "minItems": 12, "maxItems": 12,
            "items": {"enum": ["red", "green", "blue", "größer", "漢字 und 😀"]},
        },
    },
}  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": chat("Tell me of the sea", ignore_eos=True),
    "repetition penalty": chat("And of the sky", repetition_penalty=1.3, ignore_eos=True),
    "many alphabets": chat("日本語 русский 😀 ελληνικά", ignore_eos=True),
    "seed": chat("A dice", temperature=1, seed=11, ignore_eos=True),
    "frequency penalty": chat("Once more", frequency_penalty=0.8, ignore_eos=True),
    "presence penalty and seed": chat(
        "Twice", presence_penalty=0.8, temperature=0.9, seed=4, ignore_eos=True
    ),
    "json schema": chat("Colours", response_format=SCHEMA, temperature=1, seed=3),
    "three choices": chat("Thrice", n=3, temperature=1, seed=5, ignore_eos=True, max_tokens=60),
    "least length and stop": chat("An end", min_tokens=60, stop=["e"], temperature=1, seed=6),
    "logprobs": chat("How sure", logprobs=True, top_logprobs=2, ignore_eos=True),
}


@pytest.fixture(scope="session")
def whole() -> dict[str, dict[int, Heard]]:
    """Uninterrupted answers, asked for once."""
    return {}


def expected(pool: Pool, whole: dict[str, dict[int, Heard]], name: str) -> dict[int, Heard]:
    if name not in whole:
        whole[name] = pool.uninterrupted(REQUESTS[name])
    return whole[name]


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_that_is_cut_is_the_one_it_would_have_been(name: str, pool: Pool, whole: dict) -> None:
    wanted = expected(pool, whole, name)
    # With several choices the wire counts the ids of all of them.
    longest = min(len(choice.ids) for choice in wanted.values())
    chance = random.Random(f"{SEED} {name}")
    for cut in [1, *sorted(chance.sample(range(2, longest - 2), 3)), longest - 2]:
        pool.heal()
        pool.wire.cut_after(cut)
        heard = pool.ask(REQUESTS[name])
        assert pool.wire.cuts, "nothing was cut"
        assert heard == wanted, f"cut after {cut} tokens (seed {SEED})"


def test_a_stop_string_over_the_cut_stops(pool: Pool) -> None:
    """Its first half comes from one server and its second half from the other."""
    said = pool.uninterrupted(chat("Stop here", ignore_eos=True))[0]
    texts = [pool.tokenizer.decode(said.ids[: count + 1]) for count in range(len(said.ids))]
    # Between two tokens of plain letters, where the text so far has no such stop string yet.
    for cut in range(20, TOKENS - 1):
        left, right = texts[cut - 1], texts[cut][len(texts[cut - 1]) :]
        stop = left[-2:] + right[:2]
        if stop.isascii() and stop.isalpha() and len(stop) == 4 and stop not in left:
            break
    else:
        pytest.fail("the model never said two plain words")
    request = chat("Stop here", ignore_eos=True, stop=[stop])
    pool.wire.cut_after(cut)
    heard = pool.ask(request)
    assert pool.wire.cuts
    assert heard == pool.uninterrupted(request)
    assert heard[0].text == texts[cut][: texts[cut].index(stop)]


def test_half_a_character_on_each_side_of_the_cut_is_a_whole_one(pool: Pool) -> None:
    # All that it may say is characters of several tokens.
    word = "漢字日本語русскийΩ😀"
    schema = {"type": "string", "enum": [word * 3]}
    format_ = {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}
    request = chat("Spell", response_format=format_, temperature=0)
    whole = pool.uninterrupted(request)
    inside = [
        count
        for count in range(2, len(whole[0].ids) - 2)
        if pool.tokenizer.decode(whole[0].ids[:count]).endswith("\ufffd")
    ]
    for cut in random.Random(SEED).sample(inside, 4):
        pool.heal()
        pool.wire.cut_after(cut)
        assert pool.ask(request) == whole, f"cut after {cut} tokens (seed {SEED})"
        assert pool.wire.cuts
    assert whole[0].text == f'"{word * 3}"'


# --- servers that really end ------------------------------------------------------------------------------

WAYS: dict[str, Callable[[VllmServer], None]] = {
    "kill -9": VllmServer.vanish,
    "kill -15": VllmServer.terminate,
    "kill -9 of its engine core": VllmServer.kill_engine_core,
}


def are_in_full_swing(heard: list[dict[int, Heard]]) -> bool:
    return all(answer and any(len(choice.ids) >= 5 for choice in answer.values()) for answer in heard)


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_ends_in_mid_answer_is_not_missed(way: str, pool: Pool, whole: dict) -> None:
    """Answers of every kind at the same time, each somewhere else when it happens."""
    wanted = [expected(pool, whole, name) for name in REQUESTS]
    heard = pool.ask_all(
        list(REQUESTS.values()), when=are_in_full_swing, then=lambda: WAYS[way](pool.servers[0])
    )
    for name, got, want in zip(REQUESTS, heard, wanted, strict=True):
        assert got == want, name
    answers = pool.door.answers(len(REQUESTS))
    assert {answer.outcome for answer in answers} == {Outcome.COMPLETED}
    assert any(len(answer.legs) == 2 for answer in answers), "it ended too late to matter"
    said = sum(len(choice.ids) for answer in heard for choice in answer.values())
    assert sum(answer.completion_tokens for answer in answers) == said
    pool.servers[0].clear_away()


def test_a_server_that_drains_ends_its_answers_and_gets_no_new_ones(pool: Pool, whole: dict) -> None:
    """With --shutdown-timeout a SIGTERM lets answers run on, and /health says that all is well."""
    server = pool.servers[0]
    server.clear_away()
    server.extra = ("--shutdown-timeout", "60")
    server.start()
    server.wait_healthy()
    names = list(REQUESTS)[:4]
    wanted = [expected(pool, whole, name) for name in names]
    heard = pool.ask_all([REQUESTS[name] for name in names], when=are_in_full_swing, then=server.terminate)
    assert heard == wanted
    assert pool.ask(REQUESTS["greedy"]) == expected(pool, whole, "greedy")
    *drained, last = pool.door.answers(len(names) + 1)
    assert {[leg.node for leg in answer.legs][-1] for answer in drained} == {"a"}
    assert last.legs[-1].node == "b"
    server.clear_away()
