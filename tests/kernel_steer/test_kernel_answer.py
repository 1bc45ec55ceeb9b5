"""The tests of answers and of the gateway again, over TCP and on the kernel engine.

They stand in test_answer, test_answer_faults and test_gateway; here they only get other parts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from kernel_steer.admission import Outcome
from kernel_steer.engine.kernel import KernelEngine
from tests.kernel_steer import harness, test_answer_faults, test_gateway
from tests.kernel_steer.engine_double import SCRIPT, TOKENIZER_JSON, EngineDouble, _write_document
from tests.kernel_steer.harness import AdmissionDouble, Bench, make_work
from tests.kernel_steer.kernel_support import needs_kernel_engine, tcp_pair
from tests.kernel_steer.test_answer import assert_uninterrupted, test_it_works  # noqa: F401
from tests.kernel_steer.test_answer_faults import *  # noqa: F403
from tests.kernel_steer.test_answer_faults import bench, nodes  # noqa: F401
from tests.kernel_steer.test_gateway import (  # noqa: F401
    test_a_client_that_vanishes_is_charged_what_it_got,
    test_an_offer_to_upgrade_is_not_taken_up,
    test_chunked_request_body_and_expect_continue,
    test_draining_finishes_open_answers_and_refuses_new_ones,
    test_openai_client_sees_an_error_when_every_node_is_lost,
    test_openai_client_streams_through_the_loss_of_a_node,
    test_openai_client_without_streaming,
)

pytestmark = needs_kernel_engine


class _TcpInsteadOfUnix:
    """The module socket, but for socketpair()."""

    socketpair = staticmethod(tcp_pair)

    def __getattr__(self, name: str):
        return getattr(socket, name)


@pytest.fixture(autouse=True)
def _kernel_parts(monkeypatch):
    engines = []

    def make() -> KernelEngine:
        engines.append(KernelEngine(flows_max=16))
        return engines[-1]

    for module in (harness, test_answer_faults, test_gateway):
        monkeypatch.setattr(module, "RelayEngine", make)
        monkeypatch.setattr(module, "socket", _TcpInsteadOfUnix())
    yield
    for engine in engines:
        assert engine.stats.flows_open == 0
        engine.close()


@pytest.fixture
async def door(tmp_path):
    async with (
        EngineDouble("a").running() as a,
        EngineDouble("b").running() as b,
        test_gateway.open_door(tmp_path, a, b) as door,
    ):
        yield door


@pytest.fixture
def engine(_kernel_parts):
    return harness.RelayEngine()


class PacedDouble(EngineDouble):
    """Says one chunk at a time, each when the kernel can forward it, and dies inside one of them."""

    engine: KernelEngine
    die_in: int = 10**9  # chunk
    die_at: int = 0  # byte of it
    how: str = "eof"
    short_way: int = 0

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "content-length" not in head:
            _write_document(writer, 200, TOKENIZER_JSON)
            await writer.drain()
            return
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.requests.append(("/v1/chat/completions", body))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, (_, chunk) in enumerate(self.body("/v1/chat/completions", body)):
            if number:  # with the first one the gateway opens its flow
                await self._until_the_gateway_sleeps()
            writer.write(chunk if number != self.die_in else chunk[: self.die_at])
            await writer.drain()
            if number == self.die_in:
                await self._end(writer, self.how)
                return

    async def _until_the_gateway_sleeps(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
            for flow in self.engine._by_index.values():
                if flow._sleeper is not None and not flow._sleeper.done():
                    self.short_way = flow._lane.redirected
                    return


@pytest.mark.parametrize(("how", "chunk_number"), [("eof", 6), ("reset", 9)])
async def test_cuts_while_the_kernel_forwards(tmp_path, engine, how, chunk_number):
    """User space has not seen the newest events when the node dies inside the next one."""
    async with PacedDouble("a").running() as a, EngineDouble("b").running() as b:
        a.engine, a.how, a.die_in = engine, how, chunk_number
        bench = Bench(AdmissionDouble([a, b]), tmp_path, engine)
        chunk = a.body("/v1/chat/completions", make_work().body)[a.die_in][1]
        for a.die_at in range(len(chunk) + 1):
            bench.admission.failed.clear()
            told, answer = await bench.stream(make_work())
            assert_uninterrupted(told)
            assert (answer.outcome, answer.completion_tokens) == (Outcome.COMPLETED, len(SCRIPT))
            assert [leg.node for leg in answer.legs] == ["a", "b"]
            assert a.short_way > 0, "the kernel forwarded nothing"
        bench.close()


async def test_one_connection_takes_many_requests_also_pipelined(door):
    """The client's socket stays in the kernel's map between its answers; what it sends is read as ever."""
    body = json.dumps(test_gateway.ASK | {"stream": True}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    for at_once in (1, 1, 3, 1, 2):
        writer.write(request * at_once)
        for _ in range(at_once):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            answer = await reader.readuntil(b"0\r\n\r\n")
            assert answer.count(b"data: [DONE]") == 1
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).endswith(b"}")
    writer.close()
    await door.gateway.settled(2)
    assert [answer.completion_tokens for answer in door.admission.answers] == [len(SCRIPT)] * 8


async def test_expect_continue(door):
    body = json.dumps(test_gateway.ASK).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer apx_test_good\r\n"
        b"Content-Length: %d\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n" % len(body)
    )
    answer = await door.raw(head + body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
