"""What had to be read or generated again, and because of whom: a cost of the platform, told with each leg."""

from __future__ import annotations

import asyncio

import pytest

from kernel_steer.resume.classify import ResumeClass
from tests.kernel_steer.engine_double import PROMPT_IDS, SCRIPT, EngineDouble, Fault
from tests.kernel_steer.harness import AdmissionDouble, Bench, make_work
from tests.kernel_steer.test_answer_faults import _move_when_paused

PROMPT = len(PROMPT_IDS)


@pytest.fixture
async def bench(tmp_path):
    async with EngineDouble("a").running() as a, EngineDouble("b").running() as b:
        made = Bench(AdmissionDouble([a, b]), tmp_path)
        yield made
        made.close()


def told(answer) -> list[tuple[str, int, str]]:
    return [(leg.node, leg.repeated_tokens, leg.lost_to) for leg in answer.legs]


async def test_an_answer_of_one_leg_repeats_nothing(bench):
    _, answer = await bench.stream(make_work())
    assert told(answer) == [("a", 0, "")]


@pytest.mark.parametrize("resume_class", [ResumeClass.APPEND, ResumeClass.REPLAY])
async def test_the_next_leg_reads_or_generates_again_what_was_there(bench, resume_class):
    bench.admission.doubles[0].fault = Fault(abort_after=5)
    work = make_work(resume_class=resume_class, sampling={"temperature": 0, "seed": 1})
    _, answer = await bench.stream(work)
    assert told(answer) == [("a", 0, ""), ("b", PROMPT + 5, "a")]
    assert answer.completion_tokens == len(SCRIPT)


async def test_a_node_that_died_before_its_first_word_cost_the_prompt(bench):
    bench.admission.doubles[0].fault = Fault(error_event_after=0)
    _, answer = await bench.stream(make_work())
    assert told(answer) == [("a", 0, ""), ("b", PROMPT, "a")]


async def test_a_standby_that_looked_at_the_prompt_did_so_for_the_node_that_goes(bench):
    a, _ = bench.admission.doubles
    a.fault = Fault(pause_after=4)
    moving = asyncio.ensure_future(_move_when_paused(bench, a, lambda run: run.carrier.leave))
    _, answer = await bench.stream(make_work())
    await moving
    # It may have ended before it could be moved; the look was in vain then, and still the leaving node's cost.
    assert told(answer)[:2] == [("a", 0, ""), ("b", PROMPT + 4 + 1, "a")]
    assert answer.legs[1].ended == "warmed"
