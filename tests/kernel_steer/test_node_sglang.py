"""Nodes that run SGLang are used as they are: its endings are told apart, and its answers go on elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernel_steer.engine_double import SCRIPT, SCRIPT_TEXT, Fault
from tests.kernel_steer.fake_sglang import FakeSglang
from tests.kernel_steer.harness import AdmissionDouble, Bench, Told, make_work


async def ask(folder: Path, fault: Fault, *, repeats: bool = False) -> tuple[Told, int, int]:
    """What the client got, tokens charged, and legs."""
    work = make_work(include_usage=True)
    if repeats:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        work = replace(work, body=work.body | {"stream_options": usage})
    first = FakeSglang("a", fault=fault, repeats=repeats)
    async with first.running() as a, FakeSglang("b").running() as b:
        bench = Bench(AdmissionDouble([a, b]), folder)
        told, answer = await bench.stream(work)
        bench.close()
    return told, answer.completion_tokens, len(answer.legs)


async def test_it_works(tmp_path: Path) -> None:
    told, tokens, legs = await ask(tmp_path, Fault())
    assert (told.text, told.finish_reasons, told.dones) == (SCRIPT_TEXT, ["stop"], 1)
    assert (tokens, legs) == (len(SCRIPT), 1)


@pytest.mark.parametrize("repeats", [False, True], ids=["", "the last token comes again"])
@pytest.mark.parametrize("count", range(1, len(SCRIPT)))
async def test_an_abort_that_looks_like_an_end_is_none(tmp_path: Path, count: int, repeats: bool) -> None:
    """A token that comes again is charged and continued once."""
    told, tokens, legs = await ask(tmp_path, Fault(abort_after=count), repeats=repeats)
    assert (told.text, told.finish_reasons, told.dones) == (SCRIPT_TEXT, ["stop"], 1)
    assert (tokens, legs) == (len(SCRIPT), 2)
    assert told.usage[-1]["completion_tokens"] == len(SCRIPT)


async def test_an_abort_with_a_status_is_an_error_event_and_no_end(tmp_path: Path) -> None:
    told, tokens, legs = await ask(tmp_path, Fault(error_event_after=4))
    assert (told.text, told.errors, tokens, legs) == (SCRIPT_TEXT, [], len(SCRIPT), 2)


@pytest.mark.parametrize("before_the_end", range(1, 500, 45))
async def test_a_cut_around_the_last_words_changes_nothing(tmp_path: Path, before_the_end: int) -> None:
    """All text is out, and the chunk with its reason is not, or only in part."""
    whole = sum(len(chunk) for _, chunk in FakeSglang("a").body("/v1/chat/completions", {"model": "double"}))
    told, tokens, _ = await ask(tmp_path, Fault(cut_at_byte=whole - before_the_end, how="reset"))
    assert (told.text, told.finish_reasons, tokens) == (SCRIPT_TEXT, ["stop"], len(SCRIPT))
