"""Wherever a stream is cut and whatever was asked for: what docs/gateway.md promises of each parameter holds.

Cut are the bytes of the first node's answers; the client reads a whole answer, which is compared with one
that nobody interrupted. The nodes keep the state that real engines keep (double_model.py).
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_steer.admission import Answer, Outcome
from kernel_steer.engine.kernel import KernelEngine
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.requests import ChatRequest, CompletionRequest, parse_request
from kernel_steer.gateway.work import make_work
from kernel_steer.resume.said import CONTENT, extend, pieces_of
from kernel_steer.resume.work import Work
from tests.kernel_steer import harness
from tests.kernel_steer.double_model import CALLS, DOCUMENT, REFRAIN, THOUGHT, decode, other
from tests.kernel_steer.engine_double import PROMPT_IDS, PROMPT_TEXT, SCRIPT, EngineDouble, Fault
from tests.kernel_steer.harness import AdmissionDouble, Bench, Told, VerbatimEngine
from tests.kernel_steer.kernel_support import needs_kernel_engine, tcp_pair

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "time")]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@dataclass(frozen=True)
class Case:
    """`nodes` is what both nodes are; `exact`: the promise is the very answer of an uninterrupted run."""

    name: str
    asks: dict[str, Any]
    nodes: dict[str, Any] = field(default_factory=dict)
    chat: bool = True
    exact: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def work(self) -> Work:
        question = {"messages": [{"role": "user", "content": "hi"}]} if self.chat else {"prompt": PROMPT_TEXT}
        body = {"model": "double", "stream": True, **question, **self.asks}
        if not self.chat:
            body = {"max_tokens": 100} | body
        asked: ChatRequest | CompletionRequest = parse_request(
            ChatRequest if self.chat else CompletionRequest, json.dumps(body).encode()
        )
        reasoning = self.nodes.get("reasoning", False)
        return make_work(
            asked,
            reasoning=reasoning,
            request_id=str(uuid.UUID(int=7)),
            customer="c",
            received_at=time.monotonic(),
        )


def usage(**more: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True, **more}}


WORDS = {"script": REFRAIN}
GREEDY = {"temperature": 0}
CASES = [
    Case("greedy", GREEDY),
    Case("greedy-utf8-json", GREEDY | usage(), {"ascii_json": False}),
    Case("greedy-completion", GREEDY, chat=False),
    Case("completion-from-ids", GREEDY | {"prompt": PROMPT_IDS}, chat=False),
    Case("several-tokens-per-event", GREEDY, {"tokens_per_event": 3}),
    Case("max_tokens", GREEDY | {"max_tokens": 6}),
    Case("max_completion_tokens", GREEDY | usage() | {"max_completion_tokens": 3}),
    Case("max_tokens-completion", GREEDY | {"max_tokens": 6}, chat=False),
    Case("min_tokens", {"min_tokens": 9}, {"ends_at": 4}),
    Case("stop", GREEDY | {"stop": ['"mat"\\']}),
    Case("stop-that-does-not-come", GREEDY | {"stop": ["\n ü!", ",,"]}),
    Case("stop-completion", GREEDY | {"stop": "\\\n"}, chat=False),
    Case("stop_token_ids", GREEDY | {"stop_token_ids": [SCRIPT[5]]}),
    Case("stop_token_ids-completion", GREEDY | {"stop_token_ids": [SCRIPT[8]]}, chat=False),
    Case("sampled", {"temperature": 0.9, "top_p": 0.9, "top_k": 9, "min_p": 0.1}, WORDS, exact=False),
    Case("sampled-completion", {"temperature": 0.9}, WORDS, chat=False, exact=False),
    Case("seed", {"temperature": 0.9, "seed": 7}, WORDS),
    Case("seed-completion", {"temperature": 0.9, "seed": 8, "stop": "日"}, WORDS, chat=False),
    Case("frequency_penalty", GREEDY | {"frequency_penalty": 1}, WORDS),
    Case("presence_penalty", {"presence_penalty": 1}, WORDS | {"tokens_per_event": 2}),
    Case("repetition_penalty", GREEDY | {"repetition_penalty": 1.3}, WORDS),
    Case("response_format", {"response_format": SCHEMA}),
    Case("structured_outputs", {"structured_outputs": {"regex": "..."}}, chat=False),
    Case("guided-and-short", {"response_format": SCHEMA, "max_tokens": 5}),
    Case("logprobs", GREEDY | {"logprobs": True, "top_logprobs": 2}),
    Case("logprobs-without-alternatives", GREEDY | {"logprobs": True}, {"tokens_per_event": 2}),
    Case("logprobs-completion", GREEDY | {"logprobs": 2}, chat=False),
    Case("logprobs-of-a-replay", {"logprobs": True, "frequency_penalty": 1}, WORDS | {"tokens_per_event": 3}),
    Case("usage", GREEDY | usage()),
    Case("continuous_usage_stats", GREEDY | usage(continuous_usage_stats=True)),
    Case("continuous_usage_stats-replay", {"seed": 3} | usage(continuous_usage_stats=True)),
    Case("tools", {"tools": TOOLS}, {"script": CALLS}),
    Case("tools-several-tokens", {"tools": TOOLS} | usage(), {"script": CALLS, "tokens_per_event": 4}),
    Case("tool_choice-none", GREEDY | {"tools": TOOLS, "tool_choice": "none"}),
    Case("reasoning", GREEDY, {"script": THOUGHT, "reasoning": True}),
    Case("reasoning-and-tools", {"tools": TOOLS}, {"script": THOUGHT + CALLS[:30], "reasoning": True}),
    Case("n", GREEDY | {"n": 3}),
    Case("n-seed", {"n": 2, "seed": 5, "temperature": 1} | usage(), WORDS),
    Case("n-completion", GREEDY | {"n": 2} | usage(continuous_usage_stats=True), chat=False),
    Case("n-sampled", {"n": 2, "temperature": 1}, WORDS, exact=False),
    Case("n-tools", {"n": 2, "tools": TOOLS}, {"script": CALLS[:30]}),
]  # fmt: skip


@dataclass
class Choice:
    """One choice as a client adds it up."""

    ids: list[int] = field(default_factory=list)
    strands: dict[Any, str] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    roles: int = 0

    @property
    def text(self) -> str:
        return self.strands.get(CONTENT, "")


def choices_of(told: Told) -> list[Choice]:
    found: dict[int, Choice] = defaultdict(Choice)
    for event in told.events:
        for said in event.choices:
            choice = found[said["index"]]
            choice.ids += said.get("token_ids") or []
            for strand, text in pieces_of(said):
                assert strand[-1] not in ("id", "type", "name") or strand not in choice.strands, "said twice"
                extend(choice.strands, strand, text)
            if logprobs := said.get("logprobs"):
                choice.logprobs.append(logprobs)
            choice.roles += bool((said.get("delta") or {}).get("role"))
            choice.reasons += [said["finish_reason"]] if said.get("finish_reason") else []
    return [found[index] for index in range(len(found))]


def merged(parts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = defaultdict(list)
    for part in parts:
        for name, values in part.items():
            out[name] += values
    return dict(out)


def without_call_ids(strands: dict[Any, str]) -> dict[Any, str]:
    """They are drawn anew in each run."""
    return {strand: text for strand, text in strands.items() if strand[-1] != "id"}


def check(case: Case, told: Told, answer: Answer, whole: Told) -> None:
    """`whole` is the answer that nobody interrupted."""
    assert not told.errors
    assert told.whole
    assert (told.dones, told.events[-1].done) == (1, True)
    bodies = [event.body for event in told.events if event.body]
    assert len({(body["id"], body["object"], body["created"], body["model"]) for body in bodies}) == 1
    choices, wanted = choices_of(told), choices_of(whole)
    assert len(choices) == len(wanted)
    for choice, want in zip(choices, wanted, strict=True):
        assert choice.roles == (1 if case.chat else 0)
        assert choice.reasons == want.reasons
        if case.exact:
            assert choice.ids == want.ids
            assert without_call_ids(choice.strands) == without_call_ids(want.strands)
            assert merged(choice.logprobs) == merged(want.logprobs)
        else:
            script = case.nodes["script"]
            assert len(choice.ids) == len(script)
            assert all(token in (best, other(best)) for token, best in zip(choice.ids, script, strict=True))
            assert choice.text == decode(choice.ids)
    delivered = sum(len(choice.ids) for choice in choices)
    assert (answer.outcome, answer.prompt_tokens) == (Outcome.COMPLETED, len(PROMPT_IDS))
    assert answer.completion_tokens == delivered
    assert len({leg.number for leg in answer.legs}) == len(answer.legs)
    if case.asks.get("stream_options"):
        assert told.usage[-1]["completion_tokens"] == delivered
        assert told.usage[-1]["prompt_tokens"] == len(PROMPT_IDS)
        every = case.asks["stream_options"].get("continuous_usage_stats")
        assert every or len(told.usage) == 1
        running = [each["completion_tokens"] for each in told.usage]
        assert running == sorted(running)
    else:
        assert not told.usage


class Stand:
    """Two nodes that are alike, and a gateway's parts before them."""

    def __init__(self, case: Case, folder: Path, engine: RelayEngine) -> None:
        self.case = case
        self.a, self.b = EngineDouble("a", **case.nodes), EngineDouble("b", **case.nodes)
        self.bench = Bench(AdmissionDouble([self.a, self.b]), folder, engine)

    async def __aenter__(self) -> Stand:
        self._running = [self.a.running(), self.b.running()]
        for node in self._running:
            await node.__aenter__()
        self.whole, _ = await self.bench.stream(self.case.work())
        return self

    async def __aexit__(self, *exc: object) -> None:
        for node in self._running:
            await node.__aexit__(None, None, None)
        self.bench.close()

    @property
    def chunks(self) -> list[bytes]:
        """What the first node says, cut into its HTTP chunks."""
        return [chunk for _, chunk in self.a.body(self.case.path, self.a.requests[0][1])]

    async def cut(self, at: int) -> None:
        """The first node is lost for good after `at` bytes of its body."""
        self.a.fault = Fault(cut_at_byte=at, how="eof" if at % 2 else "reset")
        self.bench.admission.failed.clear()
        told, answer = await self.bench.stream(self.case.work())
        try:
            check(self.case, told, answer, self.whole)
        except AssertionError:
            said = b"".join(self.chunks)
            print("cut at", at, said[max(0, at - 80) : at], told.raw[-1200:])  # noqa: T201
            raise
        assert self.bench.admission.legs_open == 0


def boundaries(chunks: list[bytes]) -> list[int]:
    ends, position = [0], 0
    for chunk in chunks:
        position += len(chunk)
        ends.append(position)
    return ends


by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_case
async def test_cut_around_every_event(case, tmp_path):
    """At each boundary and a byte beside it, by an engine that lets half events through."""
    async with Stand(case, tmp_path, VerbatimEngine()) as stand:
        ends = boundaries(stand.chunks)
        for end in ends[:: 1 if len(ends) < 30 else 2]:
            for at in {end - 1, end, end + 1}:
                if 0 <= at < ends[-1]:
                    await stand.cut(at)


@by_case
async def test_cut_between_events_of_the_relay(case, tmp_path):
    async with Stand(case, tmp_path, RelayEngine()) as stand:
        for at in boundaries(stand.chunks)[:-1:3]:
            await stand.cut(at)


@needs_kernel_engine
@by_case
async def test_cut_between_events_of_the_kernel(case, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "socket", _TcpInsteadOfUnix())
    engine = KernelEngine(flows_max=16)
    try:
        async with Stand(case, tmp_path, engine) as stand:
            for at in boundaries(stand.chunks)[1:-1:3]:
                await stand.cut(at + 1)
        assert engine.stats.flows_open == 0
    finally:
        engine.close()


class _TcpInsteadOfUnix:
    socketpair = staticmethod(tcp_pair)

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


@settings(max_examples=150, deadline=None)
@given(case=st.sampled_from(CASES), place=st.floats(0, 1, exclude_max=True), engine=st.booleans())
def test_cut_at_any_byte(case, place, engine):
    async def run() -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            async with Stand(case, Path(folder), VerbatimEngine() if engine else RelayEngine()) as stand:
                await stand.cut(int(place * len(b"".join(stand.chunks))))

    asyncio.run(run())


def test_the_cases_do_what_they_are_there_for():
    """A penalty that changes nothing, or a call that is never made, would prove nothing."""

    async def whole(case: Case) -> list[Choice]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            async with Stand(case, Path(folder), RelayEngine()) as stand:
                return choices_of(stand.whole)

    by_name = {case.name: asyncio.run(whole(case)) for case in CASES}
    assert by_name["greedy"][0].ids == SCRIPT
    for name in ("seed", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert by_name[name][0].ids != REFRAIN
    assert by_name["n-seed"][0].ids != by_name["n-seed"][1].ids
    assert by_name["response_format"][0].text == decode(DOCUMENT)
    assert by_name["tools"][0].strands["tool_calls", 0, "arguments"] == '{"city":"Köln"}'
    assert by_name["tools"][0].reasons == ["tool_calls"]
    assert by_name["reasoning"][0].strands["reasoning_content",] == "Hm, 2+2…"
    assert by_name["stop_token_ids"][0].reasons == ["stop"]
    assert by_name["min_tokens"][0].ids == SCRIPT[:9]
