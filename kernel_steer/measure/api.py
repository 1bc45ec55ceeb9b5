"""Through the API door: live answers, a prober that never stops asking, and signals.

*reroute* is from the signal's publication at the listener to the first byte of the next answer that the
standby gives. The prober asks again as soon as it has an answer, so a question's own time is part of it.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import orjson

from kernel_steer.measure.gateway import NODES, fresh_key, run_gateway
from kernel_steer.measure.machine import (
    PATIENCE_S,
    BenchFailed,
    Part,
    own_database,
    raise_file_limit,
    wait_for,
)
from kernel_steer.measure.node import LIVE, MODEL, event, role_chunk, run_node
from kernel_steer.measure.result import Result
from kernel_steer.resume.chunked import ChunkedDecoder
from kernel_steer.signals import STREAM, GatewayBook, Signal, connect, publish
from kernel_steer.signals.report import INDEX

# Far away: answers stay where they are. Moving them is another measurement.
_DEADLINE = timedelta(minutes=5)


def measure(
    *, engine: str, flows: int, flips: int, redis_url: str, say: Callable[[str], None] = lambda text: None
) -> Result:
    """Starts two nodes and a gateway, makes `flips` flips with `flows` live answers. Raises BenchFailed."""
    wanted = 4 * flows + 256
    if (allowed := raise_file_limit(wanted)) < wanted:
        raise BenchFailed(f"{wanted} open files are needed, this system allows {allowed} (ulimit -n)")
    redis_url = own_database(redis_url)
    key, context = fresh_key(), multiprocessing.get_context("spawn")
    parts = [Part(context, run_node) for _ in NODES]
    try:
        gateway = Part(
            context, run_gateway, engine, [part.first for part in parts], redis_url, key, flows + 64
        )
        parts.append(gateway)
        port, name = gateway.first
        say(f"{name} engine, {flows} live answers, {flips} flips")
        live = _Live(port, flows)
        live.start()
        reroute_ms = _flip_many(port, flips, redis_url, key, say)
        live.stop()
        result = Result("api", name, flows, flips, gateway.ask("times"), reroute_ms)
        live.check_into(result)
        gateway.tell("stop")
        return result
    finally:
        with connect(redis_url) as client:
            client.delete(STREAM, INDEX)
        for part in parts:
            part.end()


@dataclass(slots=True)
class _Reader:
    sock: socket.socket
    got: bytes = b""
    reset: bool = False


@dataclass(slots=True)
class _Live:
    """The clients of the live answers, read by a thread."""

    port: int
    count: int
    _readers: list[_Reader] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        selector = selectors.DefaultSelector()
        for _ in range(self.count):
            sock = socket.create_connection(("127.0.0.1", self.port))
            sock.sendall(request(LIVE))
            sock.setblocking(False)
            self._readers.append(_Reader(sock))
            selector.register(sock, selectors.EVENT_READ, self._readers[-1])
        self._thread = threading.Thread(target=self._read, args=(selector,), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not all(b"token_ids" in reader.got for reader in self._readers):
            if time.monotonic() > deadline:
                raise BenchFailed("the live answers did not begin")
            time.sleep(0.05)

    def _read(self, selector: selectors.BaseSelector) -> None:
        while not self._stop.is_set():
            for chosen, _ in selector.select(0.1):
                reader = chosen.data
                try:
                    data = reader.sock.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    reader.reset = True
                    selector.unregister(reader.sock)
                reader.got += data

    def stop(self) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
        for reader in self._readers:
            reader.sock.close()

    def check_into(self, result: Result) -> None:
        """Every answer must be the node's bytes from the first one on, none left out, none twice."""
        for reader in self._readers:
            result.client_resets += reader.reset
            lost, doubled = _compare(reader.got.split(b"\r\n\r\n", 1)[1])
            result.bytes_lost += lost
            result.bytes_duplicated += doubled


def _compare(body: bytes) -> tuple[int, int]:
    """Bytes of events that are missing and that came twice, by the ids that count up in them."""
    payload = b"".join(piece.payload for piece in ChunkedDecoder().feed(body))
    events = [orjson.loads(part[6:]) for part in payload.split(b"\n\n")[1:-1] if part.startswith(b"data: {")]
    seen = Counter(token for one in events for token in one["choices"][0]["token_ids"])
    lost = sum(len(event(position)) for position in range(max(seen, default=0)) if position not in seen)
    doubled = sum(len(event(position)) * (count - 1) for position, count in seen.items())
    expected = role_chunk() + b"".join(event(position) for position in range(len(seen)))
    if not lost and not doubled and not body.startswith(expected[: len(body)]):
        lost = len(expected)  # the same tokens in other bytes would be a fault too
    return lost, doubled


def _flip_many(port: int, flips: int, redis_url: str, key: bytes, say: Callable[[str], None]) -> list[float]:
    client, stop = connect(redis_url), threading.Event()
    book = GatewayBook(connect(redis_url), stop)
    book.start()
    prober = _Prober(port)
    prober.start()
    try:
        wait_for(lambda: bool(book.gateways), "the gateway did not register for datagrams")
        epochs, times = dict.fromkeys(NODES, 0), []
        for number in range(flips):
            current = NODES[number % 2]
            prober.wait_for(current)
            now = datetime.now(UTC)
            signal = Signal(current, epochs[current], "terminate", "bench", now, now + _DEADLINE)
            asked_ns = time.monotonic_ns()
            book.send(signal, key)
            publish(client, signal, key)
            prober.wait_for(NODES[1 - number % 2])
            times.append((prober.since_ns - asked_ns) / 1e6)
            epochs[current] += 1
            if number % 50 == 49:
                say(f"{number + 1} of {flips} flips, median {statistics.median(times):.2f} ms")
        return times
    finally:
        prober.stop()
        stop.set()
        book.join()
        client.close()


class _Prober(threading.Thread):
    """Asks short questions one after the other; knows from which node the answers come, and since when."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.node = ""
        self.since_ns = 0
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stop_event = threading.Event()

    def run(self) -> None:
        question = request("probe")
        while not self._stop_event.is_set():
            self._sock.sendall(question)
            got = self._sock.recv(65536)
            first_ns = time.monotonic_ns()
            node = got.split(b"x-apex-node: ", 1)[1].split(b"\r\n", 1)[0].decode()
            if node != self.node:
                self.since_ns = first_ns
                self.node = node
            while not got.endswith(b"0\r\n\r\n"):
                got += self._sock.recv(65536)
        self._sock.close()

    def wait_for(self, node: str) -> None:
        """Returns when the answers come from this node. Raises BenchFailed."""
        wait_for(lambda: self.node == node, f"no answer comes from node {node}")

    def stop(self) -> None:
        self._stop_event.set()
        self.join(PATIENCE_S)


def request(question: str) -> bytes:
    body = orjson.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": question}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
