"""Answers of other kinds than one plain stream: documents, servers without ids, parsers that differ, endings."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kernel_steer.admission import Outcome, Refusal, Resume
from kernel_steer.resume.classify import ResumeClass
from kernel_steer.resume.state import Shape
from tests.kernel_steer.double_model import CALLS, REFRAIN, THOUGHT, decode
from tests.kernel_steer.engine_double import PROMPT_IDS, SCRIPT, SCRIPT_TEXT, EngineDouble, Fault
from tests.kernel_steer.harness import MODEL, QUICK, AdmissionDouble, Bench, make_work
from tests.kernel_steer.test_answer import assert_uninterrupted
from tests.kernel_steer.test_every_parameter import TOOLS, Case, choices_of


@pytest.fixture
async def nodes():
    async with EngineDouble("a").running() as a, EngineDouble("b").running() as b:
        yield a, b


@pytest.fixture
def bench(tmp_path, nodes):
    bench = Bench(AdmissionDouble(list(nodes)), tmp_path)
    yield bench
    assert bench.admission.legs_open == 0
    bench.close()


def alike(nodes, **what) -> None:
    for node in nodes:
        for name, value in what.items():
            setattr(node, name, value)


class TestDocuments:
    async def test_choices(self, bench, nodes):
        nodes[0].fault = Fault(cut_at_byte=1200)
        document, answer = await bench.collect(make_work(choices=3))
        assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in document["choices"]} == {SCRIPT_TEXT}
        assert document["usage"] == {
            "prompt_tokens": len(PROMPT_IDS),
            "completion_tokens": 3 * len(SCRIPT),
            "total_tokens": len(PROMPT_IDS) + 3 * len(SCRIPT),
        }
        assert len(answer.legs) == 6
        assert answer.completion_tokens == 0, "it is delivered when the caller has written it"
        bench.runs[-1].save_told()
        told = bench.runs[-1].answer(Outcome.COMPLETED)
        assert (told.prompt_tokens, told.completion_tokens) == (len(PROMPT_IDS), 3 * len(SCRIPT))

    async def test_tool_calls(self, bench, nodes):
        alike(nodes, script=CALLS)
        nodes[0].fault = Fault(error_event_after=30)
        document, _ = await bench.collect(Case("", {"tools": TOOLS}).work())
        [choice] = document["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == " theLook."
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city":"Köln"}'},
            {"name": "time", "arguments": "{}"},
        ]
        assert all(call["id"].startswith("call-b-") for call in choice["message"]["tool_calls"])

    @pytest.mark.parametrize("chat", [True, False])
    async def test_logprobs(self, bench, nodes, chat):
        asks = {"temperature": 0} | ({"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1})
        whole, _ = await bench.collect(Case("", asks, chat=chat).work())
        nodes[0].fault = Fault(error_event_after=5)
        document, answer = await bench.collect(Case("", asks, chat=chat).work())
        assert len(answer.legs) == 2
        assert document["choices"][0]["logprobs"] == whole["choices"][0]["logprobs"]

    async def test_reasoning(self, bench, nodes):
        alike(nodes, script=THOUGHT, reasoning=True)
        nodes[0].fault = Fault(error_event_after=20)
        document, _ = await bench.collect(Case("", {}, {"reasoning": True}).work())
        message = document["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, 2+2…", "It is 4.")


class TestServersWithoutIds:
    """They are given the text so far where they can take it, and an honest error ends their answer where not."""

    @pytest.mark.parametrize("lost_after", [1, 3, 6, 9])
    @pytest.mark.parametrize("chat", [True, False])
    async def test_text_is_continued(self, bench, nodes, chat, lost_after):
        alike(nodes, resumes=Resume.TEXT, script=REFRAIN)
        nodes[0].fault = Fault(error_event_after=lost_after)
        told, answer = await bench.stream(Case("", {"max_tokens": 50}, chat=chat).work())
        assert told.text == decode(REFRAIN)
        assert (told.finish_reasons, told.dones, told.whole) == (["stop"], 1, True)
        assert not told.usage, "it was asked for by us and not by the client"
        assert (answer.outcome, answer.completion_tokens) == (Outcome.COMPLETED, len(REFRAIN))
        assert "return_token_ids" not in nodes[1].requests[0][1]
        limit = nodes[1].requests[0][1]["max_tokens"]
        assert limit == 50 - lost_after

    async def test_a_stop_string_over_the_cut(self, bench, nodes):
        alike(nodes, resumes=Resume.TEXT, script=REFRAIN)
        nodes[0].fault = Fault(error_event_after=2)
        told, _ = await bench.stream(Case("", {"stop": ["sat on"]}).work())
        assert told.text == " the cat "
        assert told.finish_reasons == ["stop"]

    async def test_usage_is_what_the_server_says(self, bench, nodes):
        alike(nodes, resumes=Resume.NONE, tokens_per_event=3)
        told, answer = await bench.stream(Case("", {"stream_options": {"include_usage": True}}).work())
        assert told.text == SCRIPT_TEXT
        assert told.usage[0]["completion_tokens"] == len(SCRIPT)
        assert (answer.prompt_tokens, answer.completion_tokens) == (len(PROMPT_IDS), len(SCRIPT))

    @pytest.mark.parametrize("asks", [{"tools": TOOLS}, {"response_format": {"type": "json_object"}}])
    async def test_parsers_and_grammars_are_not_continued_from_text(self, bench, nodes, asks):
        alike(nodes, resumes=Resume.TEXT, script=CALLS)
        nodes[0].fault = Fault(error_event_after=4)
        told, answer = await bench.stream(Case("", asks).work())
        assert [error["code"] for error in told.errors] == ["node_lost"]
        assert (told.dones, answer.outcome) == (0, Outcome.FAILED)

    async def test_an_answer_with_ids_is_not_given_to_a_server_without(self, bench, nodes):
        a, b = nodes
        a.fault, b.resumes = Fault(error_event_after=4), Resume.TEXT
        a.script = SCRIPT * 4
        _, answer = await bench.stream(make_work())
        assert not b.requests
        assert {leg.node for leg in answer.legs} == {"a"}

    async def test_a_document_is_simply_asked_for_again(self, bench, nodes):
        alike(nodes, resumes=Resume.NONE)
        nodes[0].fault = Fault(error_event_after=4)
        document, _ = await bench.collect(make_work())
        assert document["choices"][0]["message"]["content"] == SCRIPT_TEXT


class TestReplays:
    async def test_a_tool_call_that_is_repeated_with_other_words_ends_in_an_honest_error(self, bench, nodes):
        a, b = nodes
        a.script, b.script = CALLS, [*CALLS[:25], *REFRAIN]
        a.fault = Fault(error_event_after=40)
        told, answer = await bench.stream(Case("", {"tools": TOOLS}).work())
        assert [error["code"] for error in told.errors] == ["node_lost"]
        assert answer.completion_tokens == len(told.ids) == 40

    async def test_call_ids_are_the_first_nodes(self, bench, nodes):
        alike(nodes, script=CALLS)
        nodes[0].fault = Fault(error_event_after=40)
        told, _ = await bench.stream(Case("", {"tools": TOOLS}).work())
        strands = choices_of(told)[0].strands
        assert strands["tool_calls", 0, "id"].startswith("call-a-")
        assert strands["tool_calls", 1, "id"].startswith("call-b-")

    async def test_a_parser_that_nobody_declared_is_noticed(self, bench, nodes):
        """Ids have come and no words: going on from ids would show thoughts as the answer."""
        alike(nodes, script=THOUGHT, reasoning=True)
        nodes[0].fault = Fault(error_event_after=3)
        await bench.services.tokenizers.get(
            (node := bench.admission.choose_node("double")).tokenizer_id, [f"http://127.0.0.1:{node.port}"]
        )
        bench.admission.node_released("a", 1)
        told, _ = await bench.stream(Case("", {"temperature": 0}).work())
        assert told.text == "It is 4."
        assert bench.services.parts_thoughts(MODEL), "from now on it is known"


class TestChoices:
    async def test_one_that_cannot_be_continued_ends_them_all_with_one_error(self, bench, nodes):
        alike(nodes, script=SCRIPT * 4, fault=Fault(error_event_after=3))
        told, answer = await bench.stream(make_work(choices=2))
        assert len(told.errors) == 1
        assert told.dones == 0
        assert told.whole
        assert answer.outcome is Outcome.FAILED
        assert answer.completion_tokens == len(told.ids)

    async def test_what_is_wrong_with_the_request_is_an_http_error(self, bench, nodes):
        alike(nodes, fault=Fault(refuse={"message": "too hot", "param": "temperature", "code": None}))
        with pytest.raises(Refusal) as caught:
            await bench.stream(make_work(choices=3))
        assert caught.value.status == 400

    async def test_seeds_are_those_that_vllm_would_give(self, bench, nodes):
        await bench.stream(Case("", {"n": 3, "seed": 40}).work())
        assert sorted(body["seed"] for _, body in nodes[0].requests) == [40, 41, 42]
        assert not any("n" in body for _, body in nodes[0].requests)


class TestEndings:
    @pytest.mark.parametrize("how", list(ResumeClass))
    @pytest.mark.parametrize("shape", list(Shape))
    @pytest.mark.parametrize(
        "fault",
        [
            Fault(error_event_after=4),
            Fault(abort_after=4),
            Fault(silent_after=4),
            Fault(cut_at_byte=1300, how="stall"),
            Fault(error_event_after=0),
            Fault(silent_after=0),
        ],
        ids=["error-event", "abort", "partition", "stall", "error-in-prefill", "partition-in-prefill"],
    )
    async def test_none_is_shown(self, tmp_path, nodes, fault, shape, how):
        body = {"model": "double", "prompt": PROMPT_IDS, "stream": True, "return_token_ids": True}
        work = make_work(resume_class=how) if shape is Shape.CHAT else make_work(shape=shape, body=body)
        nodes[0].fault = fault
        # In a prefill a node may be silent for long.
        limits = replace(QUICK, head_s=0.4)
        told, answer = await Bench(AdmissionDouble(list(nodes)), tmp_path, limits=limits).stream(work)
        assert_uninterrupted(told)
        assert answer.completion_tokens == len(SCRIPT)

    async def test_a_token_that_is_said_again_at_the_end_counts_once(self, bench, nodes):
        nodes[0].fault = Fault(repeat_after=4)
        work = Case(
            "", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "temperature": 0}
        ).work()
        told, answer = await bench.stream(work)
        assert told.ids == SCRIPT
        assert answer.completion_tokens == len(SCRIPT)
        assert [leg.ended for leg in answer.legs] == ["bad", "completed"]

    async def test_a_request_that_kills_nodes_does_not_kill_them_all(self, tmp_path):
        doubles = [EngineDouble(name, fault=Fault(error_event_after=0)) for name in "abcde"]
        async with AsyncExitStack() as stack:
            for double in doubles:
                await stack.enter_async_context(double.running())
            told, answer = await Bench(AdmissionDouble(doubles), tmp_path).stream(make_work())
        assert len(told.errors) == 1
        assert [leg.node for leg in answer.legs] == ["a", "b", "c"]

    async def test_pings_while_a_long_prompt_is_read(self, tmp_path, nodes):
        """And the engine takes the answer over all the same, when it comes."""
        a = nodes[0]
        bench = Bench(AdmissionDouble([a]), tmp_path, limits=replace(QUICK, keep_alive_s=0.02))
        a.prefill_s = 0.1
        told, _ = await bench.stream(make_work())
        assert b": ping\n\n" in told.raw
        assert_uninterrupted(told)
        assert bench.services.engine.stats.flows_total == 1
