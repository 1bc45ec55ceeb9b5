"""An answer survives its nodes: no token lost, none doubled, charged as delivered."""

from __future__ import annotations

import pytest

from kernel_steer.admission import Outcome
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.resume.classify import ResumeClass
from kernel_steer.resume.state import Shape
from tests.kernel_steer.engine_double import PROMPT_IDS, SCRIPT, SCRIPT_TEXT, EngineDouble, Fault
from tests.kernel_steer.harness import AdmissionDouble, Bench, Told, VerbatimEngine, make_work


@pytest.fixture(params=[RelayEngine, VerbatimEngine], ids=["whole-events", "verbatim"])
def engine(request):
    return request.param()


def assert_uninterrupted(told: Told, *, usage: bool = False) -> None:
    """What no client may be able to tell from an answer of one node."""
    assert told.ids == SCRIPT
    assert told.text == SCRIPT_TEXT
    assert told.finish_reasons == ["stop"]
    assert told.dones == 1
    assert told.events[-1].done
    assert told.whole
    assert not told.errors
    bodies = [event.body for event in told.events if event.body]
    # One identity from the first chunk to the last: the first node's, or the standby's when the first
    # was lost before it had said a whole chunk.
    assert len({(body["id"], body["object"], body["created"], body["model"]) for body in bodies}) == 1
    if bodies[0]["object"] == "chat.completion.chunk":
        assert sum(bool(c["delta"].get("role")) for event in told.events for c in event.choices) == 1
    expected = {
        "prompt_tokens": len(PROMPT_IDS),
        "completion_tokens": len(SCRIPT),
        "total_tokens": len(PROMPT_IDS) + len(SCRIPT),
    }
    assert told.usage == ([expected] if usage else [])


async def test_it_works(tmp_path, engine):
    async with EngineDouble("a").running() as a:
        bench = Bench(AdmissionDouble([a]), tmp_path, engine)
        told, answer = await bench.stream(make_work())
    assert_uninterrupted(told)
    assert told.raw.split(b"\r\n\r\n", 1)[1] == b"".join(
        chunk for _, chunk in a.body("/v1/chat/completions", {"model": "double"})
    )
    assert (answer.outcome, answer.prompt_tokens, answer.completion_tokens) == (
        Outcome.COMPLETED,
        len(PROMPT_IDS),
        len(SCRIPT),
    )
    assert [leg.ended for leg in answer.legs] == ["completed"]


@pytest.mark.parametrize(
    ("ascii_json", "usage", "how"),
    [(True, False, ResumeClass.APPEND), (False, True, ResumeClass.APPEND), (True, True, ResumeClass.REPLAY)],
    ids=["ascii", "utf8-usage", "replay"],
)
async def test_cut_at_every_byte(tmp_path, engine, ascii_json, usage, how):
    """In the chunk size, in an event, in an escape, in a character, after the finish, before [DONE]."""
    work = make_work(include_usage=usage)
    async with EngineDouble("a", ascii_json=ascii_json).running() as a, EngineDouble("b").running() as b:
        bench = Bench(AdmissionDouble([a, b]), tmp_path, engine)
        whole = b"".join(chunk for _, chunk in a.body("/v1/chat/completions", work.body))
        # A replay meets the client at the same places; every third is enough to see that it does.
        for cut in range(0, len(whole), 3 if how is ResumeClass.REPLAY else 1):
            a.fault = Fault(cut_at_byte=cut, how="eof" if cut % 2 else "reset")
            bench.admission.failed.clear()
            told, answer = await bench.stream(make_work(include_usage=usage, resume_class=how))
            try:
                assert_uninterrupted(told, usage=usage)
                assert (answer.outcome, answer.completion_tokens) == (Outcome.COMPLETED, len(SCRIPT))
                assert answer.prompt_tokens == len(PROMPT_IDS)
            except AssertionError:
                print("cut at", cut, whole[max(0, cut - 60) : cut], told.raw[-600:])  # noqa: T201
                raise


async def test_a_text_completion_survives_every_seventh_cut(tmp_path, engine):
    body = {"model": "double", "prompt": PROMPT_IDS, "stream": True, "return_token_ids": True}
    async with EngineDouble("a").running() as a, EngineDouble("b").running() as b:
        bench = Bench(AdmissionDouble([a, b]), tmp_path, engine)
        whole = b"".join(chunk for _, chunk in a.body("/v1/completions", body))
        for cut in range(0, len(whole), 7):
            a.fault = Fault(cut_at_byte=cut)
            bench.admission.failed.clear()
            told, answer = await bench.stream(make_work(shape=Shape.COMPLETION, body=body))
            assert_uninterrupted(told)
            assert {event.body["object"] for event in told.events if event.body} == {"text_completion"}
            assert (answer.prompt_tokens, answer.completion_tokens) == (len(PROMPT_IDS), len(SCRIPT))
