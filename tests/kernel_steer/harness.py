"""Runs answers against engine doubles and reads them back as a client would."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_steer.admission import Answer, Caller, FlipReport, ModelCard, Node, OnceKey, Refusal, Ticket
from kernel_steer.engine.relay import RelayEngine, RelayFlow
from kernel_steer.engine.wake import ClientWatch
from kernel_steer.journal import Journal
from kernel_steer.ports import Endpoint
from kernel_steer.resume.answer import AnswerRun
from kernel_steer.resume.chunked import ChunkedDecoder, Phase
from kernel_steer.resume.classify import ResumeClass
from kernel_steer.resume.reader import Event, parse_event
from kernel_steer.resume.sink import CollectSink, StreamSink
from kernel_steer.resume.state import Shape
from kernel_steer.resume.tokens import TokenizerStore
from kernel_steer.resume.work import Limits, Services, Work
from tests.kernel_steer.engine_double import TOKENIZER_ID, EngineDouble

MODEL = ModelCard("double", 4096, 1764550000, "tests")
# Short where a test waits for them, and yet longer than a busy machine leaves a process standing.
QUICK = Limits(
    head_s=5,
    token_gap_s=2.5,
    done_gap_s=1.5,
    search_s=3.0,
    first_search_s=1.0,
    ping_s=0.05,
    poll_s=0.005,
    retry_s=0.01,
    gap_floor_s=2.5,
)


@dataclass
class AdmissionDouble:
    """The business in memory: one key, one model, the doubles as nodes in order of preference."""

    doubles: list[EngineDouble]
    key: str = "apx_test_good"
    credit: bool = True
    answers: list[Answer] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    flips: list[FlipReport] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    draining: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)  # nodes that there are not
    legs_open: int = 0
    prefixes: list[bytes] = field(default_factory=list)
    begun: dict[str, OnceKey] = field(default_factory=dict)
    kept: dict[OnceKey, bytes] = field(default_factory=dict)
    steered_ports: list[Endpoint] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def authenticate(self, authorization: str | None) -> Caller:
        if authorization != f"Bearer {self.key}":
            raise Refusal(401, "invalid_api_key", "Unknown API key")
        return Caller("key", "customer")

    async def list_models(self, caller: Caller) -> Sequence[ModelCard]:
        return [MODEL]

    async def admit(
        self,
        caller: Caller,
        *,
        request_id: str,
        model: str,
        prompt_tokens_max: int,
        completion_tokens_max: int | None,
        choices: int = 1,
    ) -> Ticket:
        if model != MODEL.name:
            raise Refusal(404, "model_not_found", f"There is no model {model}")
        if not self.credit:
            raise Refusal(402, "insufficient_quota", "Not enough credit: 0.01 USD short")
        return Ticket(request_id, MODEL, completion_tokens_max or MODEL.context_tokens, {"hold": 1})

    def choose_node(
        self, model: str, *, exclude: frozenset[str] = frozenset(), prefix: bytes = b""
    ) -> Node | None:
        self.prefixes.append(prefix)
        bad = exclude | self.draining | {name for name, _ in self.failed}
        for double in self.doubles:
            if double.name not in bad:
                self.legs_open += 1
                return Node(double.name, 1, "127.0.0.1", double.port, TOKENIZER_ID, double.resumes)
        return None

    def node_released(self, name: str, epoch: int) -> None:
        self.legs_open -= 1

    def node_draining(self, name: str, epoch: int) -> None:
        self.draining.add(name)

    def node_restored(self, name: str, epoch: int) -> None:
        self.draining.discard(name)

    def knows_node(self, name: str) -> bool:
        return name not in self.unknown

    def node_failed(self, name: str, epoch: int, reason: str) -> None:
        self.failed.append((name, reason))

    def node_misconfigured(self, name: str, epoch: int, reason: str) -> None:
        self.failed.append((name, reason))

    def endpoints(self) -> Sequence[Endpoint]:
        return self.steered_ports

    async def begin_once(self, once: OnceKey, request_id: str) -> bytes | None:
        self.begun[request_id] = once
        return self.kept.get(once)

    async def keep_once(self, request_id: str, answer: bytes | None) -> None:
        assert answer is not None
        self.kept[self.begun.pop(request_id)] = answer

    async def forget_once(self, request_id: str) -> None:
        del self.begun[request_id]

    async def settle(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.settled.set()

    async def abandon(self, request_id: str, record: dict[str, Any]) -> None:
        self.abandoned.append(request_id)
        self.settled.set()

    async def report_flip(self, report: FlipReport) -> None:
        self.flips.append(report)


class VerbatimEngine(RelayEngine):
    """Forwards every byte that comes, as the kernel does: the client may be cut in mid-event."""

    name = "verbatim"

    def open_flow(self, *, gate: Any, **arguments: Any) -> RelayFlow:
        position = itertools.count()
        seen = 0

        def let_all_through(data: bytes) -> int:
            nonlocal seen
            seen += len(data)
            next(position)
            gate(data)
            return seen

        return super().open_flow(gate=let_all_through, **arguments)


@dataclass
class Told:
    """What a client got."""

    raw: bytes
    events: list[Event] = field(default_factory=list)
    whole: bool = False  # the body ended with the last chunk
    reset: bool = False

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish_reasons(self) -> list[str]:
        return [event.finish_reason for event in self.events if event.finish_reason]

    @property
    def dones(self) -> int:
        return sum(event.done for event in self.events)

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event.body["error"] for event in self.events if event.body and "error" in event.body]

    @property
    def usage(self) -> list[dict[str, Any]]:
        return [event.usage for event in self.events if event.usage]


def read_told(raw: bytes) -> Told:
    """Parses strictly, with nothing of the code under test but the chunk decoder (tested on its own)."""
    head, body = raw.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200"), head
    decoder = ChunkedDecoder()
    payload = b"".join(piece.payload for piece in decoder.feed(body))
    told = Told(raw, whole=decoder.phase is Phase.END)
    assert payload.endswith(b"\n\n") or not told.whole, payload[-200:]
    for part in payload.split(b"\n\n"):
        data = b"\n".join(line[5:].strip() for line in part.split(b"\n") if line.startswith(b"data:"))
        if not data:
            continue
        if data == b"[DONE]":
            told.events.append(parse_event(part))
        else:
            told.events.append(Event(json.loads(data), raw=part))
    return told


def make_work(**changes: Any) -> Work:
    values: dict[str, Any] = {
        "request_id": str(uuid.uuid4()),
        "shape": Shape.CHAT,
        "model": "double",
        "body": {"model": "double", "messages": [], "stream": True, "return_token_ids": True},
        "sampling": {"temperature": 0},
        "completion_tokens_max": None,
        "min_tokens": 0,
        "choices": 1,
        "include_usage": False,
        "resume_class": ResumeClass.APPEND,
    }
    values |= changes
    if values.get("stop"):
        values["body"] = values["body"] | {"stop": values["stop"]}
        values["sampling"] = values["sampling"] | {"stop": values["stop"]}
    if values["include_usage"]:
        values["body"] = values["body"] | {"stream_options": {"include_usage": True}}
    if values["completion_tokens_max"]:
        values["body"] = values["body"] | {"max_tokens": values["completion_tokens_max"]}
    return Work(**values)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Apex-Node: {node}\r\n\r\n"


class Bench:
    """Services that many answers share, and a way to run one answer and read it."""

    def __init__(
        self,
        admission: AdmissionDouble,
        folder: Any,
        engine: RelayEngine | None = None,
        limits: Limits = QUICK,
    ) -> None:
        self.admission = admission
        self.runs: list[AnswerRun] = []
        self.journal = Journal(folder / "journal", slots=16)
        self.services = Services(
            admission, engine or RelayEngine(), TokenizerStore(folder / "tokenizers"), limits
        )

    async def stream(self, work: Work) -> tuple[Told, Answer]:
        ours, clients = socket.socketpair()
        for sock in (ours, clients):
            sock.setblocking(False)
        watch = ClientWatch(ours)
        slot = self.journal.open()
        run = AnswerRun(
            work, Ticket(work.request_id, MODEL, 4096), StreamSink(watch, HEAD), slot, self.services
        )
        self.runs.append(run)
        reading = asyncio.ensure_future(_read_all(clients))
        try:
            answer = await run.run()
        finally:
            watch.stop()
            ours.close()
            raw = await reading
            clients.close()
            self.journal.free(slot)
        return read_told(raw), answer

    async def collect(self, work: Work) -> tuple[dict[str, Any], Answer]:
        ours, clients = socket.socketpair()
        ours.setblocking(False)
        watch = ClientWatch(ours)
        slot = self.journal.open()
        run = AnswerRun(work, Ticket(work.request_id, MODEL, 4096), CollectSink(watch), slot, self.services)
        self.runs.append(run)
        try:
            answer = await run.run()
            return run.document(), answer
        finally:
            watch.stop()
            ours.close()
            clients.close()
            self.journal.free(slot)

    def close(self) -> None:
        self.journal.close()


async def _read_all(sock: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    out = b""
    while data := await loop.sock_recv(sock, 65536):
        out += data
    return out
