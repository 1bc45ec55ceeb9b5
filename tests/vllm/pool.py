"""The pool that the tests talk to: real servers, one of them behind a wire that can be cut, the real gateway."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from tokenizers import Tokenizer

from kernel_steer.admission import Answer, ModelCard, Node, Ticket
from kernel_steer.engine import select_engine
from kernel_steer.resume.work import Limits
from tests.kernel_steer.front_door import FrontDoor
from tests.kernel_steer.harness import AdmissionDouble
from tests.vllm.servers import VllmServer

CARD = ModelCard("tiny", 2048, 1764550000, "tests")
# A real engine on a busy machine may pause between two tokens; that is no death.
PATIENT = Limits(token_gap_s=20, search_s=10)
_READ_BYTES = 65536


class Wire:
    """The connections to one server. `cut_after(k)` ends the next one in the event after k tokens."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._cut_after: int | None = None
        self.cuts = 0
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    def cut_after(self, tokens: int) -> None:
        self._cut_after, self.cuts = tokens, 0

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        limit, self._cut_after = self._cut_after, None
        with client, socket.create_connection(("127.0.0.1", self._server.port)) as server:
            threading.Thread(target=_pump, args=(client, server), daemon=True).start()
            if limit is None:
                _pump(server, client)
            else:
                for piece in self._until_cut(server, limit):
                    client.sendall(piece)
                _hang_up(client)
                _hang_up(server)

    def _until_cut(self, server: socket.socket, limit: int) -> Iterator[bytes]:
        """What the server says until some way into the event after `limit` tokens."""
        rest, tokens = b"", 0
        while data := _received(server):
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if tokens >= limit:
                    self.cuts += 1
                    yield event[:40]
                    return
                tokens += _ids_in(event)
                yield event + b"\n\n"


_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')


def _ids_in(event: bytes) -> int:
    return sum(len(found.split(b",")) for found in _IDS.findall(event) if found)


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket) -> None:
    while data := _received(source):
        try:
            target.sendall(data)
        except OSError:
            return
    _hang_up(target)  # the client left: the server's work is aborted


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_READ_BYTES)
    except OSError:
        return b""


@dataclass
class RealNodes(AdmissionDouble):
    """The business in memory, in front of real servers in order of preference."""

    servers: Sequence[VllmServer] = ()
    ports: dict[str, int] = field(default_factory=dict)  # where a server is reached, when not directly
    tokenizer_id: str = ""

    async def admit(
        self, caller: Any, *, request_id: str, completion_tokens_max: int | None, **_: Any
    ) -> Ticket:
        return Ticket(request_id, CARD, completion_tokens_max or CARD.context_tokens, {"hold": 1})

    def choose_node(self, model: str, *, exclude: frozenset[str] = frozenset(), **_: Any) -> Node | None:
        bad = exclude | self.draining | {name for name, _ in self.failed}
        for server in self.servers:
            if server.name not in bad:
                self.legs_open += 1
                port = self.ports.get(server.name, server.port)
                return Node(server.name, server.epoch, "127.0.0.1", port, self.tokenizer_id)
        return None


@dataclass
class Heard:
    """What a client got of one choice."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclass
class Pool:
    servers: Sequence[VllmServer]
    wire: Wire
    door: FrontDoor
    admission: RealNodes
    tokenizer: Tokenizer

    @classmethod
    @contextmanager
    def of(
        cls, servers: Sequence[VllmServer], model: Path, folder: Path, engine: str = "auto"
    ) -> Iterator[Pool]:
        raw = (model / "tokenizer.json").read_bytes()
        tokenizer_id = hashlib.sha256(raw).hexdigest()
        # As a gateway has it that has fetched it once.
        (folder / "tokenizers").mkdir(parents=True)
        (folder / "tokenizers" / f"{tokenizer_id}.json").write_bytes(raw)
        wire = Wire(servers[0])
        admission = RealNodes(
            [], servers=servers, ports={servers[0].name: wire.port}, tokenizer_id=tokenizer_id
        )
        with FrontDoor(admission, folder, engine=select_engine(engine), limits=PATIENT) as door:
            yield cls(servers, wire, door, admission, Tokenizer.from_buffer(raw))
        wire.close()

    def heal(self) -> None:
        """All nodes are good again in the eyes of the gateway."""
        self.admission.failed.clear()

    def uninterrupted(self, request: dict[str, Any]) -> dict[int, Heard]:
        """The second server's own answer, without the gateway."""
        return asyncio.run(_listen(self.servers[1].url, request))

    def ask(self, request: dict[str, Any]) -> dict[int, Heard]:
        return asyncio.run(_listen(self.door.url, request))

    def ask_all(
        self,
        requests: Sequence[dict[str, Any]],
        when: Callable[[list[dict[int, Heard]]], bool],
        then: Callable[[], None],
    ) -> list[dict[int, Heard]]:
        """All at the same time; `then` is done once, as soon as `when` is true of what was heard so far."""
        return asyncio.run(_listen_all(self.door.url, requests, when, then))

    def last_answer(self) -> Answer:
        return self.door.answers(1)[-1]


async def _listen_all(
    url: str, requests: Sequence[dict[str, Any]], when: Any, then: Any
) -> list[dict[int, Heard]]:
    heard: list[dict[int, Heard]] = [{} for _ in requests]
    streams = [asyncio.ensure_future(_listen(url, r, h)) for r, h in zip(requests, heard, strict=True)]
    while not when(heard):
        assert not all(stream.done() for stream in streams), "all is said already"
        await asyncio.sleep(0.002)
    then()
    await asyncio.gather(*streams)
    return heard


async def _listen(
    url: str, request: dict[str, Any], heard: dict[int, Heard] | None = None
) -> dict[int, Heard]:
    heard = {} if heard is None else heard
    async with openai.AsyncOpenAI(
        api_key="apx_test_good", base_url=f"{url}/v1", max_retries=0, timeout=120
    ) as client:
        stream = await client.post(
            "/chat/completions",
            body={"model": "tiny", "stream": True, "return_token_ids": True, **request},
            cast_to=openai.types.chat.ChatCompletion,
            stream=True,
            stream_cls=openai.AsyncStream[openai.types.chat.ChatCompletionChunk],
        )
        async for chunk in stream:
            for choice in chunk.choices:
                one = heard.setdefault(choice.index, Heard())
                one.ids += (choice.model_extra or {}).get("token_ids") or []
                one.text += choice.delta.content or ""
                one.finish_reason = choice.finish_reason or one.finish_reason
    return heard
