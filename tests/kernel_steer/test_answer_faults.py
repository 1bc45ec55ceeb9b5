"""Ways of a node to die, to lie and to be slow, and what the client gets instead."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace

import pytest

from kernel_steer.admission import Outcome, Refusal, Resume, Ticket
from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.engine.wake import ClientWatch
from kernel_steer.resume.answer import AnswerRun
from kernel_steer.resume.classify import ResumeClass
from kernel_steer.resume.sink import StreamSink
from tests.kernel_steer.double_model import REFRAIN
from tests.kernel_steer.engine_double import (
    PROMPT_IDS,
    SCRIPT,
    SCRIPT_TEXT,
    TOKENIZER_ID,
    EngineDouble,
    Fault,
)
from tests.kernel_steer.harness import HEAD, MODEL, QUICK, AdmissionDouble, Bench, make_work
from tests.kernel_steer.test_answer import assert_uninterrupted

STOP = '"mat"\\'  # two tokens
STOP_TOKENS = 7  # up to its end: " the", the four bytes of an emoji, and the two


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


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut_at_byte=1500, how="eof"),
        Fault(cut_at_byte=1500, how="reset"),
        Fault(cut_at_byte=1500, how="stall"),
        Fault(error_event_after=3),
        Fault(abort_after=3),
    ],
    ids=["eof", "reset", "stall", "error-event", "abort-then-done"],
)
async def test_every_ending_is_resumed_and_none_is_shown(bench, nodes, fault):
    nodes[0].fault = fault
    told, answer = await bench.stream(make_work())
    assert_uninterrupted(told)
    assert len(answer.legs) == 2
    assert [leg.node for leg in answer.legs] == ["a", "b"]
    assert answer.legs[0].ended in {"eof", "reset", "stalled", "bad"}
    assert answer.completion_tokens == len(SCRIPT)


async def test_the_standby_gets_prompt_and_emitted_ids_and_the_rest_of_the_budget(bench, nodes):
    nodes[0].fault = Fault(error_event_after=4)
    await bench.stream(
        make_work(completion_tokens_max=10, min_tokens=6, sampling={"temperature": 0.5, "top_p": 0.9})
    )
    path, body = nodes[1].requests[0]
    assert path == "/v1/completions"
    assert body["prompt"] == PROMPT_IDS + SCRIPT[:4]
    assert (body["max_tokens"], body["min_tokens"]) == (6, 2)
    assert (body["temperature"], body["top_p"]) == (0.5, 0.9)


async def test_an_answer_can_lose_several_nodes(tmp_path):
    async with (
        EngineDouble("a").running() as a,
        EngineDouble("b").running() as b,
        EngineDouble("c").running() as c,
    ):
        a.fault, b.fault = Fault(error_event_after=3), Fault(error_event_after=3)
        told, answer = await Bench(AdmissionDouble([a, b, c]), tmp_path).stream(make_work())
    assert_uninterrupted(told)
    assert [leg.completion_tokens for leg in answer.legs] == [3, 3, len(SCRIPT) - 6]
    # The second and third node read again what had been said: the platform's cost, not the customer's.
    assert [leg.prompt_tokens for leg in answer.legs] == [3, 6, 9]
    assert answer.prompt_tokens == len(PROMPT_IDS)


async def test_a_limit_that_was_reached_with_the_last_token_needs_no_standby(bench, nodes):
    nodes[0].fault = Fault(error_event_after=4)
    told, answer = await bench.stream(make_work(completion_tokens_max=4))
    assert told.finish_reasons == ["length"]
    assert (told.ids, told.dones, told.whole) == (SCRIPT[:4], 1, True)
    assert not nodes[1].requests
    assert answer.outcome is Outcome.COMPLETED


async def test_an_end_of_text_that_was_delivered_needs_no_standby(bench, nodes):
    a, b = nodes
    a.script = [*SCRIPT[:4], 0, *SCRIPT[4:]]  # id 0 is end of text
    a.fault = Fault(error_event_after=5)
    await bench.services.tokenizers.get(TOKENIZER_ID, [f"http://127.0.0.1:{b.port}"])
    told, answer = await bench.stream(make_work())
    assert (told.finish_reasons, told.dones, told.whole) == (["stop"], 1, True)
    assert answer.completion_tokens == 5
    assert not b.requests


async def test_a_replay_asks_the_same_question_and_swallows_what_was_said(bench, nodes):
    nodes[0].fault = Fault(error_event_after=4)
    told, answer = await bench.stream(make_work(resume_class=ResumeClass.REPLAY))
    assert_uninterrupted(told)
    assert [path for path, _ in nodes[1].requests] == ["/v1/chat/completions"]
    assert nodes[0].requests[0][1] == nodes[1].requests[0][1]
    assert answer.completion_tokens == len(SCRIPT)


async def test_a_replay_that_goes_another_way_becomes_a_continuation(bench, nodes):
    a, b = nodes
    a.fault = Fault(error_event_after=4)
    b.script = [*SCRIPT[:2], SCRIPT[0], *SCRIPT[3:]]
    told, answer = await bench.stream(make_work(resume_class=ResumeClass.REPLAY))
    assert told.ids == SCRIPT[:4] + b.script[4:]
    assert [path for path, _ in b.requests] == ["/v1/chat/completions", "/v1/completions"]
    assert [leg.ended for leg in answer.legs] == ["bad", "diverged", "completed"]
    assert not [name for name, _ in bench.admission.failed if name == "b"]


async def test_a_replay_of_another_prompt_has_diverged(bench, nodes):
    """Its words may be the same by chance: they are the answer to something else."""
    a, b = nodes
    a.fault = Fault(error_event_after=4)
    b.prompt_ids = [*PROMPT_IDS[:-1], 5, 1]
    told, answer = await bench.stream(make_work(resume_class=ResumeClass.REPLAY))
    assert_uninterrupted(told)
    assert [leg.ended for leg in answer.legs] == ["bad", "diverged", "completed"]


async def test_a_replay_that_ends_too_early_has_diverged(bench, nodes):
    a, b = nodes
    a.fault = Fault(error_event_after=4)
    b.script = SCRIPT[:3]
    told, _ = await bench.stream(make_work(resume_class=ResumeClass.REPLAY, may_append=False))
    assert [error["code"] for error in told.errors] == ["node_lost"]
    assert "repeat its answer exactly" in told.errors[0]["message"]
    assert told.ids == SCRIPT[:4]


async def test_pings_while_a_replay_catches_up(tmp_path):
    async with EngineDouble("a").running() as a, EngineDouble("b").running() as b:
        bench = Bench(AdmissionDouble([a, b]), tmp_path, limits=replace(QUICK, ping_s=0.0))
        a.fault = Fault(error_event_after=6)
        told, _ = await bench.stream(make_work(resume_class=ResumeClass.REPLAY))
    assert b": ping\n\n" in told.raw
    assert_uninterrupted(told)


@pytest.mark.parametrize("how", [ResumeClass.APPEND, ResumeClass.REPLAY])
@pytest.mark.parametrize("lost_after", range(1, STOP_TOKENS))
async def test_a_stop_string_is_found_wherever_the_cut_falls(bench, nodes, lost_after, how):
    """Also over the cut, where each node sees only its half of it."""
    nodes[0].fault = Fault(error_event_after=lost_after)
    told, answer = await bench.stream(make_work(resume_class=how, stop=[STOP]))
    assert told.text == SCRIPT_TEXT[: SCRIPT_TEXT.index(STOP)]
    assert (told.finish_reasons, told.dones, told.whole) == (["stop"], 1, True)
    assert answer.completion_tokens == len(told.ids) == STOP_TOKENS


async def test_both_nodes_dead_is_one_error_event_and_the_bill_stops_at_what_was_delivered(bench, nodes):
    for node in nodes:
        node.script, node.fault = SCRIPT * 4, Fault(error_event_after=3)
    told, answer = await bench.stream(make_work())
    assert [error["code"] for error in told.errors] == ["node_lost"]
    assert told.dones == 0
    assert not told.finish_reasons
    assert told.whole
    assert told.ids == (SCRIPT * 4)[: 3 * QUICK.legs_max]
    assert (answer.outcome, answer.completion_tokens) == (Outcome.FAILED, len(told.ids))


async def test_nothing_told_yet_is_an_http_error(bench, nodes):
    for node in nodes:
        await node.kill()
    with pytest.raises(Refusal) as caught:
        await bench.collect(make_work())
    assert (caught.value.status, caught.value.retry_after_s) == (503, 2)


async def test_a_server_that_cannot_be_continued_gets_an_honest_error(bench, nodes):
    nodes[0].script = REFRAIN
    nodes[0].resumes, nodes[0].fault = Resume.NONE, Fault(error_event_after=3)
    told, answer = await bench.stream(make_work())
    assert len(told.errors) == 1
    assert "cannot be continued" in told.errors[0]["message"]
    assert not nodes[1].requests
    assert answer.completion_tokens == 3


async def test_its_request_is_simply_begun_again_when_nothing_was_said(bench, nodes):
    nodes[0].resumes, nodes[0].fault = Resume.NONE, Fault(error_event_after=0)
    told, _ = await bench.stream(make_work())
    assert_uninterrupted(told)


async def test_a_request_the_node_calls_wrong_is_not_the_nodes_fault(bench, nodes):
    nodes[0].fault = Fault(refuse={"message": "temperature too hot", "param": "temperature", "code": None})
    with pytest.raises(Refusal) as caught:
        await bench.stream(make_work())
    assert (caught.value.status, caught.value.param) == (400, "temperature")
    assert not bench.admission.failed
    assert not nodes[1].requests


async def test_a_node_that_answers_500_is_passed_over(bench, nodes):
    nodes[0].fault = Fault(status=500)
    told, answer = await bench.stream(make_work())
    assert told.ids == SCRIPT
    assert [leg.node for leg in answer.legs] == ["b"]
    assert not bench.admission.failed, "one customer's request says nothing about the node"


async def test_a_collected_answer_survives_as_well(bench, nodes):
    nodes[0].fault = Fault(cut_at_byte=1200, how="reset")
    document, answer = await bench.collect(make_work())
    assert document["choices"][0]["message"] == {"role": "assistant", "content": SCRIPT_TEXT}
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == len(SCRIPT)
    assert len(answer.legs) == 2


async def test_pings_while_there_is_no_node(tmp_path):
    async with EngineDouble("a").running() as a, EngineDouble("b").running() as b:
        admission = AdmissionDouble([a])
        bench = Bench(admission, tmp_path)
        a.fault = Fault(pause_after=3)
        answering = asyncio.ensure_future(bench.stream(make_work()))
        while not a.paused:
            await asyncio.sleep(0)
        await a.kill()
        while bench.runs[0].choices[0].current is not None:
            await asyncio.sleep(0)
        await asyncio.sleep(0.12)  # long enough for a ping (every 0.05 s here); not a synchronisation
        admission.doubles.append(b)
        told, _ = await answering
    assert b": ping\n\n" in told.raw
    assert_uninterrupted(told)


async def test_the_time_to_the_first_ping_runs_from_the_request_on_whatever_it_waited_for(tmp_path):
    """Here a minute in the line, of one that was to be silent: the node has not said a word yet."""
    limits = replace(QUICK, keep_alive_s=60, head_s=600)

    async def read_a_long_prompt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the gateway leaves
        writer.close()

    async with await asyncio.start_server(read_a_long_prompt, "127.0.0.1", 0) as server:
        node = EngineDouble("a", port=server.sockets[0].getsockname()[1])
        bench = Bench(AdmissionDouble([node]), tmp_path, limits=limits)
        ours, client = socket.socketpair()
        for sock in (ours, client):
            sock.setblocking(False)
        watch = ClientWatch(ours)
        work = make_work(received_at=time.monotonic() - 61)
        sink, slot = StreamSink(watch, HEAD), bench.journal.open()
        answering = asyncio.ensure_future(
            AnswerRun(work, Ticket(work.request_id, MODEL, 100), sink, slot, bench.services).run()
        )
        got = b""
        async with asyncio.timeout(30):
            while not got.endswith(b": ping\n\n\r\n"):
                got += await asyncio.get_running_loop().sock_recv(client, 65536)
            assert got.startswith(b"HTTP/1.1 200")
            client.close()
            assert (await answering).outcome is Outcome.CLIENT_GONE
        watch.stop()
        ours.close()
        bench.close()


async def test_after_a_long_wait_too_an_error_has_its_status_while_no_node_was_asked(tmp_path):
    bench = Bench(AdmissionDouble([]), tmp_path, limits=replace(QUICK, keep_alive_s=60))
    with pytest.raises(Refusal) as caught:
        await bench.stream(make_work(received_at=time.monotonic() - 61))
    assert caught.value.status == 503
    bench.close()


async def test_a_client_that_leaves_stops_the_node_and_pays_for_what_it_got(bench, nodes):
    a = nodes[0]
    a.fault = Fault(pause_after=4)
    ours, client = socket.socketpair()
    for sock in (ours, client):
        sock.setblocking(False)
    watch = ClientWatch(ours)
    slot = bench.journal.open()
    work = make_work()
    run = AnswerRun(work, Ticket(work.request_id, MODEL, 100), StreamSink(watch, HEAD), slot, bench.services)
    answering = asyncio.ensure_future(run.run())
    got = b""
    while got.count(b"token_ids") < 5:  # the prompt's and four
        got += await asyncio.get_running_loop().sock_recv(client, 65536)
    client.close()
    answer = await asyncio.wait_for(answering, 30)
    while not a.disconnects:
        await asyncio.sleep(0)
    assert (answer.outcome, answer.completion_tokens) == (Outcome.CLIENT_GONE, 4)
    assert answer.legs[0].ended == "client_gone"
    assert not nodes[1].requests
    ours.close()


async def test_a_planned_move_leaves_at_a_token_when_the_standby_is_warm(bench, nodes):
    a, b = nodes
    a.fault = Fault(pause_after=4, silent_after=5)
    moving = asyncio.ensure_future(_move_when_paused(bench, a, lambda run: run.carrier.leave))
    told, answer = await bench.stream(make_work())
    await moving
    assert_uninterrupted(told)
    assert answer.completion_tokens == len(SCRIPT)
    assert not bench.admission.failed
    assert [(leg.node, leg.ended) for leg in answer.legs] == [
        ("a", "moved"),
        ("b", "warmed"),
        ("b", "completed"),
    ]
    warm, rest = [body for _, body in b.requests]
    assert (warm["prompt"], warm["max_tokens"]) == (PROMPT_IDS + SCRIPT[:4], 1)
    assert rest["prompt"] == PROMPT_IDS + SCRIPT[:5]


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "done-in-time"])
async def test_a_replay_is_begun_beside_an_answer_whose_node_goes_away(bench, nodes, lost):
    """It is heard when the node is gone, and dropped when the answer ends first."""
    a, b = nodes
    a.fault = Fault(pause_after=4, error_event_after=6 if lost else None)
    moving = asyncio.ensure_future(_move_when_paused(bench, a, lambda run: run._standby.has_leg))
    told, answer = await bench.stream(make_work(resume_class=ResumeClass.REPLAY))
    await moving
    assert_uninterrupted(told)
    assert answer.completion_tokens == len(SCRIPT)
    assert [(leg.node, leg.ended) for leg in answer.legs] == (
        [("a", "bad"), ("b", "completed")] if lost else [("a", "completed"), ("b", "shadowed")]
    )
    assert len(b.requests) == 1


async def _move_when_paused(bench, a, ready=lambda run: True) -> None:
    while not a.paused:
        await asyncio.sleep(0)
    [[run]] = [run.choices for run in bench.runs]
    while len(run.state.ids) < 4:
        await asyncio.sleep(0)
    assert run.is_on("a", 1)
    assert not run.is_on("a", 2)
    run.move()
    run.move()
    async with asyncio.timeout(30):
        while not ready(run):
            await asyncio.sleep(0)
    a.resume.set()


async def test_a_move_without_a_standby_changes_nothing(tmp_path):
    async with EngineDouble("a").running() as a:
        bench = Bench(AdmissionDouble([a]), tmp_path)
        a.fault = Fault(pause_after=4)
        moving = asyncio.ensure_future(_move_when_paused(bench, a))
        told, answer = await bench.stream(make_work())
        await moving
    assert_uninterrupted(told)
    assert [leg.ended for leg in answer.legs] == ["completed"]


async def test_a_standby_that_cannot_be_warmed_is_let_go(bench, nodes):
    a, b = nodes
    a.fault, b.fault = Fault(pause_after=4), Fault(status=500)
    moving = asyncio.ensure_future(_move_when_paused(bench, a))
    told, answer = await bench.stream(make_work())
    await moving
    assert_uninterrupted(told)
    assert [leg.ended for leg in answer.legs] == ["completed"]


async def test_a_slow_reader_costs_bounded_memory_and_loses_nothing(tmp_path):
    script = SCRIPT[:1] * 2_000
    async with EngineDouble("a", script=script).running() as a:
        bench = Bench(AdmissionDouble([a]), tmp_path)
        ours, client = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for sock in (ours, client):
            sock.setblocking(False)
        slot = bench.journal.open()
        work = make_work()
        watch = ClientWatch(ours)
        run = AnswerRun(
            work, Ticket(work.request_id, MODEL, 100), StreamSink(watch, HEAD), slot, bench.services
        )
        answering = asyncio.ensure_future(run.run())
        while slot.delivered == 0 or slot.written != slot.delivered:
            await asyncio.sleep(0.001)
            if slot.written > slot.delivered:
                break  # the client's buffer is full: the engine waits with one read in hand
        assert slot.written - slot.delivered <= 65536
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += await asyncio.get_running_loop().sock_recv(client, 65536)
        answer = await answering
    assert got.count(b'"token_ids"') == len(script)
    assert answer.completion_tokens == len(script)
    ours.close()
    client.close()


async def test_a_flipped_node_gets_no_new_leg(tmp_path, nodes):
    engine = RelayEngine()
    bench = Bench(AdmissionDouble(list(nodes)), tmp_path, engine)
    assert engine.flip(NodeKey("a", 1)) == 0
    told, answer = await bench.stream(make_work())
    assert told.ids == SCRIPT
    assert answer.legs[-1].node == "b"
