"""`kill -9` of a gateway at any moment: the next start charges what reached its clients, once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from pathlib import Path

import pytest

from kernel_steer.admission import Outcome
from kernel_steer.engine import EngineChoice
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.server import Connections, listen, recover
from kernel_steer.journal import Journal
from tests.kernel_steer.engine_double import SCRIPT, EngineDouble, Fault
from tests.kernel_steer.harness import AdmissionDouble, Bench, read_told

CLIENTS = 6
ASK = {"model": "double", "messages": [{"role": "user", "content": "hi"}], "stream": True}

EVENT = b'"token_ids"'


class Recording(AdmissionDouble):
    """Puts what it is asked for into files: the process is killed."""

    folder: Path

    async def admit(self, caller, *, request_id, **asked):
        ticket = await super().admit(caller, request_id=request_id, **asked)
        (self.folder / request_id).touch()
        return ticket

    async def settle(self, answer):
        unfinished = self.folder.parent / answer.request_id
        unfinished.write_text(str(answer.completion_tokens))
        unfinished.replace(self.folder / f"{answer.request_id}.settled")


@pytest.mark.parametrize("seed", range(8))
async def test_whenever_it_is_killed_usage_is_complete_and_single(tmp_path, seed):
    dice = random.Random(seed)
    settled = tmp_path / "settled"
    settled.mkdir()
    async with EngineDouble("a").running() as a:
        a.script = SCRIPT[:-1] * 12
        listener = listen("127.0.0.1", 0)
        address = listener.getsockname()
        child = os.fork()
        if child == 0:
            try:
                asyncio.set_event_loop(None)
                asyncio.events._set_running_loop(None)
                asyncio.run(_serve_until_killed(tmp_path, a, listener, settled))
            finally:
                os._exit(1)
        listener.close()
        enough = asyncio.Event()
        kill_after = dice.randint(0, 60_000)  # bytes of all clients together
        got = [bytearray() for _ in range(CLIENTS)]
        reading = [
            asyncio.ensure_future(_client(address, number, got, enough, kill_after))
            for number in range(CLIENTS)
        ]
        await asyncio.wait(
            [asyncio.ensure_future(enough.wait()), *reading], return_when=asyncio.FIRST_COMPLETED
        )
        os.kill(child, 9)
        os.waitpid(child, 0)
        await asyncio.gather(*reading)  # what the kernel had taken still arrives
    journal = Journal(tmp_path / "journal", slots=16)
    admission = AdmissionDouble([])
    await recover(journal, admission)
    await recover(journal, admission)
    assert journal.in_use == 0
    journal.close()
    charged = {answer.request_id: answer.completion_tokens for answer in admission.answers}
    assert len(charged) == len(admission.answers)
    assert {answer.outcome for answer in admission.answers} <= {Outcome.RECOVERED}
    # What was settled before the kill may be settled again: one row, by its request id, with the same figure.
    for path in settled.glob("*.settled"):
        assert charged.setdefault(path.stem, int(path.read_text())) == int(path.read_text())
    for path in settled.iterdir():
        assert path.stem in charged or path.stem in admission.abandoned
    presents: list[int] = []
    for number, raw in enumerate(got):
        request_id, delivered = _delivered(bytes(raw))
        if request_id is None:
            continue
        # The mark is set after the call that sends: a kill between the two makes a present of that one piece,
        # which has one event when it was told event by event, and what had come by then when it was spliced.
        present = delivered - charged.pop(request_id)
        assert 0 <= present <= (1 if number % 2 else delivered)
        presents += [present] if present else []
    assert len(presents) <= 1, "only one piece can have been between the two"
    assert not any(charged.values())  # of answers whose head had not left


@pytest.mark.parametrize("idempotent", [False, True])  # spliced by the engine, told event by event
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_killed_around_the_call_that_sends_nothing_is_charged_that_was_not_sent(
    tmp_path, moment, idempotent
):
    """In every run at that very instruction, which a random kill rarely meets."""
    settled = tmp_path / "settled"
    settled.mkdir()
    async with EngineDouble("a").running() as a:
        a.script = SCRIPT[:-1] * 60  # more than fits into one piece, so that there is a middle
        a.fault = Fault(pause_after=5)
        listener = listen("127.0.0.1", 0)
        address = listener.getsockname()
        child = os.fork()
        if child == 0:
            try:
                asyncio.set_event_loop(None)
                asyncio.events._set_running_loop(None)
                _kill_around_the_sending_of_an_event(moment, after=5)
                asyncio.run(_serve_until_killed(tmp_path, a, listener, settled))
            finally:
                os._exit(1)
        listener.close()
        got = [bytearray(), bytearray()]
        mine = got[idempotent]
        try:
            reading = asyncio.ensure_future(_client(address, int(idempotent), got, asyncio.Event(), 1 << 30))
            async with asyncio.timeout(60):
                while mine.count(EVENT) < 5:
                    await asyncio.sleep(0.01)
                a.resume.set()
                await reading
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert not mine.endswith(b"0\r\n\r\n")  # it was killed in the middle
    journal = Journal(tmp_path / "journal", slots=16)
    admission = AdmissionDouble([])
    await recover(journal, admission)
    journal.close()
    (answer,) = admission.answers
    request_id, delivered = _delivered(bytes(mine))
    assert (answer.request_id, answer.outcome) == (request_id, Outcome.RECOVERED)
    if moment == "before":
        assert answer.completion_tokens == delivered >= 5
    else:  # one piece, which may have several events
        assert 5 <= answer.completion_tokens < delivered


def _kill_around_the_sending_of_an_event(moment: str, *, after: int) -> None:
    """In this process: SIGKILL just before or just after a client's socket takes more than so many events."""
    told = 0
    send = socket.socket.send

    def deadly(sock: socket.socket, data, *flags) -> int:
        nonlocal told
        events = bytes(data).count(EVENT)
        last = events and told >= after
        if last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        sent = send(sock, data, *flags)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        told += events
        return sent

    socket.socket.send = deadly  # type: ignore[method-assign]


async def _client(address, number, got, enough, kill_after) -> None:
    reader, writer = await asyncio.open_connection(*address)
    body = json.dumps(ASK).encode()
    once = f"Idempotency-Key: k{number}\r\n" if number % 2 else ""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
        f"{once}Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    if not kill_after:
        enough.set()
    try:
        while data := await reader.read(512):
            got[number] += data
            if sum(map(len, got)) >= kill_after:
                enough.set()
            if got[number].endswith(b"\r\n0\r\n\r\n"):
                return
    except ConnectionResetError:
        pass
    finally:
        writer.close()


def _delivered(raw: bytes) -> tuple[str | None, int]:
    """The id of the answer and how many token ids came in whole events."""
    if b"\r\n\r\n" not in raw:
        return None, 0
    head, body = raw.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200 OK")
    name = next(line for line in head.split(b"\r\n") if line.startswith(b"x-request-id: "))
    whole = body[: body.rfind(b"\n\n\r\n") + 4] if b"\n\n\r\n" in body else b""
    told = read_told(head + b"\r\n\r\n" + whole) if whole else None
    return name[14:].decode(), len(told.ids) if told else 0


async def _serve_until_killed(folder: Path, double: EngineDouble, listener, settled: Path) -> None:
    admission = Recording([double])
    admission.folder = settled
    bench = Bench(admission, folder)
    gateway = Gateway(bench.services, bench.journal, EngineChoice(RelayEngine(), "test"))
    await Connections(gateway, listener).accept()
