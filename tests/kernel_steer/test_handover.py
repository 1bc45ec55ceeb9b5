"""A gateway follows another on the same port while clients come and go."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kernel_steer.engine import EngineChoice
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.handover import Handover, Predecessor, incumbent_pid
from kernel_steer.gateway.journals import Caretaker, JournalsTaken, open_journal
from kernel_steer.gateway.server import Config, Connections, listen, recover, serve
from tests.kernel_steer.engine_double import SCRIPT, EngineDouble, Fault
from tests.kernel_steer.harness import AdmissionDouble, Bench, read_told

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
ASK = json.dumps(
    {"model": "double", "messages": [{"role": "user", "content": "hi"}], "stream": True}
).encode()
STREAM = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(ASK), ASK)
)


async def eventually(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(folder: Path, admission: AdmissionDouble, valkey_url: str, *, port: int = 0, **options):
    """A whole gateway as `manage.py gateway` runs it, in this process."""
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    config = Config(
        "127.0.0.1", port, "relay", folder, valkey_url, b"k" * 32, **({"drain_s": 30.0} | options)
    )
    serving = asyncio.ensure_future(serve(config, admission, ready=started.set_result))
    await asyncio.wait([serving, started], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    yield started.result(), serving
    if not serving.done():
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


class Knocking(threading.Thread):
    """Connects again and again, and notes what was not answered as it should be."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.answered, self.failures, self.enough = port, 0, [], threading.Event()

    def run(self) -> None:
        while not self.enough.is_set():
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=30) as client:
                    client.sendall(HEALTH)
                    answer = b""
                    while data := client.recv(65536):
                        answer += data
                assert answer.startswith(b"HTTP/1.1 200 OK")
            except (OSError, AssertionError) as error:
                self.failures.append(repr(error))
            self.answered += 1


@pytest.fixture
def valkey_url(valkey_server) -> str:
    return valkey_server.url


async def test_a_successor_takes_over_and_nobody_is_refused(tmp_path, valkey_url):
    # A name of its own: signals of other tests about their nodes are still in the stream.
    async with EngineDouble("handed-over").running() as a:
        a.fault = Fault(pause_after=4)
        old, new = AdmissionDouble([a]), AdmissionDouble([a])
        async with running(tmp_path, old, valkey_url) as (port, first):
            knocking = Knocking(port)
            knocking.start()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STREAM)
            await eventually(lambda: a.paused)
            async with running(tmp_path, new, valkey_url, port=port, take_over=True) as (same, _):
                assert same == port
                assert {path.name for path in tmp_path.glob("journal*")} == {"journal", "journal-1"}
                seen = knocking.answered
                await eventually(lambda: knocking.answered > seen + 20)
                assert not first.done()  # it has an answer to finish
                a.resume.set()
                told = b""
                while not told.endswith(b"0\r\n\r\n"):
                    told += await reader.read(65536)
                assert read_told(told).ids == SCRIPT
                assert await reader.read() == b""  # the next request belongs elsewhere
                await asyncio.wait_for(first, 30)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(STREAM)
                assert await reader.readuntil(b"[DONE]")
                knocking.enough.set()
                await asyncio.to_thread(knocking.join)
                await eventually(lambda: new.answers)
        assert knocking.failures == []
        assert ([len(old.answers), len(new.answers)]) == [1, 1]


async def test_without_a_predecessor_a_successor_just_begins(tmp_path, valkey_url):
    async with running(tmp_path, AdmissionDouble([]), valkey_url, take_over=True) as (port, _):
        assert port


@pytest.fixture
async def incumbent(tmp_path):
    listener = listen("127.0.0.1", 0)
    taken = asyncio.Event()
    handover = Handover(tmp_path, listener, taken.set)
    handover.start()
    yield handover, taken
    await handover.close()
    listener.close()
    assert incumbent_pid(tmp_path) is None


async def test_a_successor_that_dies_before_it_is_ready_changes_nothing(tmp_path, incumbent):
    _, taken = incumbent
    gone = await asyncio.to_thread(Predecessor.find, tmp_path)
    gone._line.close()
    gone.listener.close()
    third = await asyncio.to_thread(Predecessor.find, tmp_path)
    assert not taken.is_set()
    await asyncio.to_thread(third.ready)
    assert taken.is_set()
    third.listener.close()


async def test_the_listener_survives_a_long_folder_name_and_is_for_its_owner_only(tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    listener = listen("127.0.0.1", 0)
    handover = Handover(folder, listener, lambda: None)
    handover.start()
    assert (folder / "handover.sock").stat().st_mode & 0o777 == 0o600
    found = await asyncio.to_thread(Predecessor.find, folder)
    assert found.listener.getsockname() == listener.getsockname()
    found.listener.close()
    await handover.close()
    listener.close()


async def test_who_waits_in_the_queue_at_the_end_is_answered(tmp_path):
    """Nobody has accepted them yet when the gateway is told to end."""
    bench = Bench(AdmissionDouble([]), tmp_path)
    gateway = Gateway(bench.services, bench.journal, EngineChoice(RelayEngine(), "test"))
    listener = listen("127.0.0.1", 0)
    connections = Connections(gateway, listener)
    clients = [await asyncio.open_connection(*listener.getsockname()) for _ in range(8)]
    for _, writer in clients:
        writer.write(HEALTH.replace(b"Connection: close\r\n", b""))
    gateway.draining = True
    connections.take_waiting()
    listener.close()
    await connections.drain(5)
    for reader, writer in clients:
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"\r\nconnection: close\r\n" in answer
        assert b'"status":"draining"' in answer
        writer.close()
    bench.close()


async def test_an_idle_connection_ends_with_the_gateway_and_a_busy_one_after_its_answer(tmp_path):
    async with EngineDouble("a").running() as a:
        a.fault = Fault(pause_after=2)
        bench = Bench(AdmissionDouble([a]), tmp_path)
        gateway = Gateway(bench.services, bench.journal, EngineChoice(RelayEngine(), "test"))
        listener = listen("127.0.0.1", 0)
        connections = Connections(gateway, listener)
        accepting = asyncio.create_task(connections.accept())
        idle, _ = await asyncio.open_connection(*listener.getsockname())
        busy, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(STREAM)
        await eventually(lambda: a.paused)
        gateway.draining = True
        accepting.cancel()
        draining = asyncio.ensure_future(connections.drain(10))
        assert await idle.read() == b""
        assert not draining.done()
        a.resume.set()
        assert (await busy.read()).endswith(b"0\r\n\r\n")
        await draining
        await gateway.settled(5)
        listener.close()
        bench.close()


async def test_every_gateway_has_a_journal_of_its_own_and_the_dead_are_settled(tmp_path, caplog):
    first = open_journal(tmp_path)
    second = open_journal(tmp_path)
    assert [journal.path.name for journal in (first, second)] == ["journal", "journal-1"]
    slot = first.open()
    slot.write_record({"request_id": "r", "started_at": 1.0, "ticket": {"hold": 1}})
    admission = AdmissionDouble([])
    caretaker = Caretaker(tmp_path, second, lambda left: recover(left, admission))
    await caretaker.look()
    assert not admission.answers  # it lives
    first.close()
    with caplog.at_level(logging.INFO):
        await asyncio.wait_for(caretaker.run(), 30)
    assert [answer.request_id for answer in admission.answers] == ["r"]
    again = open_journal(tmp_path)
    assert (again.path.name, again.in_use) == ("journal", 0)
    others = [open_journal(tmp_path) for _ in range(14)]
    with pytest.raises(JournalsTaken):
        open_journal(tmp_path)
    for journal in (second, again, *others):
        journal.close()
