"""`kill -9` of a gateway whose answers are under way in the kernel: every delivered byte is on record."""

from __future__ import annotations

import asyncio
import json
import os
import socket

import pytest

from kernel_steer.admission import Outcome
from kernel_steer.engine import EngineChoice, select_engine
from kernel_steer.engine.kernel import KernelEngine, pins, recovery
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.server import Connections, listen, recover
from kernel_steer.journal import Journal
from tests.kernel_steer.engine_double import PROMPT_IDS, SCRIPT, EngineDouble, Fault
from tests.kernel_steer.harness import AdmissionDouble, Bench
from tests.kernel_steer.kernel_support import event, needs_kernel_engine
from tests.kernel_steer.stand import Stand

pytestmark = needs_kernel_engine


def in_child(work) -> int:
    """Forks; the child runs `work` in an event loop of its own, until it is killed."""
    child = os.fork()
    if child == 0:
        try:
            asyncio.set_event_loop(None)
            asyncio.events._set_running_loop(None)
            asyncio.run(work())
        finally:
            os._exit(1)
    return child


@pytest.mark.parametrize("events", [3, 60, 500])
async def test_the_journal_is_completed_from_the_ring(tmp_path, events):
    """The child's user space sleeps while the kernel forwards; then the child is killed."""
    ours, theirs = socket.socketpair()

    async def carry() -> None:
        s = Stand(KernelEngine(flows_max=4), tmp_path)
        pumping = asyncio.ensure_future(s.pump())
        got = b""
        for n in range(events):
            await s.send(event(n))
            got += await s.receive(len(event(n)))
        assert not pumping.done()
        theirs.send(b"%d %d" % (len(got), s.flow._mirrored))
        await asyncio.sleep(60)

    child = in_child(carry)
    ours.settimeout(60)
    delivered, mirrored = map(int, ours.recv(100).split())
    os.kill(child, 9)
    os.waitpid(child, 0)
    sent = b"".join(event(n) for n in range(events))
    assert delivered == len(sent)
    assert mirrored < delivered, "user space had seen everything: nothing is tested"

    assert recovery.complete_journals() >= 1
    assert recovery.complete_journals() == 0
    journal = Journal(tmp_path / "journal", slots=1)
    [left] = journal.left_behind()
    assert left.slot.delivered == delivered
    assert left.tail == (sent if delivered <= 65_536 else b"")
    journal.close()
    ours.close()
    theirs.close()


async def test_a_killed_gateway_charges_what_the_kernel_had_delivered(tmp_path):
    """As in test_gateway, but the newest tokens have not been seen by the gateway's own code."""
    async with EngineDouble("a", script=SCRIPT * 8).running() as a:
        a.fault = Fault(pause_after=100)
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        ours, theirs = socket.socketpair()
        ours.settimeout(60)

        async def serve() -> None:
            asyncio.get_running_loop().add_reader(theirs, lambda: theirs.send(theirs.recv(1)))
            bench = Bench(AdmissionDouble([a]), tmp_path, KernelEngine(flows_max=16))
            gateway = Gateway(bench.services, bench.journal, EngineChoice(bench.services.engine, "test"))
            await Connections(gateway, listener).accept()

        child = in_child(serve)
        listener.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(
            {"model": "double", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        )
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body.encode())
        )
        got = b""
        while got.count(b'"token_ids"') < 100:
            got += await reader.read(65536)
        # A piece that the gateway sent itself is noted just after, in the same turn of its loop: once it answers, it is.
        ours.send(b"?")
        assert await asyncio.to_thread(ours.recv, 1)
        os.kill(child, 9)
        os.waitpid(child, 0)
        writer.close()
        ours.close()
        theirs.close()
    select_engine("relay")  # as every start of a gateway does, also one without the kernel engine
    journal = Journal(tmp_path / "journal", slots=16)
    admission = AdmissionDouble([])
    await recover(journal, admission)
    [answer] = admission.answers
    assert (answer.outcome, answer.prompt_tokens, answer.completion_tokens) == (
        Outcome.RECOVERED,
        len(PROMPT_IDS),
        100,
    )
    journal.close()


def test_who_reads_a_journal_waits_for_whoever_completes_it(tmp_path, monkeypatch):
    """Another gateway that starts on this machine may have begun before us. Read earlier, it would say too little."""
    slot = Journal(tmp_path / "journal", slots=1).open()
    owner = pins.Owner()
    recovery.stamp(slot, owner=owner.number, lane=0, generation=1)
    seen = []

    def looked_at() -> int:
        seen.append(owner.folder.is_dir())
        if len(seen) == 3:
            owner.close()  # the other one is through
        return 0

    monkeypatch.setattr(recovery, "complete_journals", looked_at)
    recovery.wait_until_complete([slot])
    assert seen == [True] * 3


def test_a_ring_that_nobody_completes_is_not_waited_for_for_ever(tmp_path, monkeypatch, caplog):
    slot = Journal(tmp_path / "journal", slots=1).open()
    owner = pins.Owner()  # alive, as seen from another container it would be
    recovery.stamp(slot, owner=owner.number, lane=0, generation=1)
    recovery.wait_until_complete([slot], patience_s=0.1)
    assert "not to be had" in caplog.text
    owner.close()


async def test_an_engine_that_never_carried_anything_leaves_nothing(tmp_path):
    ours, theirs = socket.socketpair()

    async def idle() -> None:
        theirs.send(KernelEngine(flows_max=1).owner.folder.name.encode())
        await asyncio.sleep(60)

    child = in_child(idle)
    ours.settimeout(60)
    folder = pins.ROOT / ours.recv(100).decode()
    assert folder.exists()
    os.kill(child, 9)
    os.waitpid(child, 0)
    recovery.complete_journals()
    assert not folder.exists()
    ours.close()
    theirs.close()
