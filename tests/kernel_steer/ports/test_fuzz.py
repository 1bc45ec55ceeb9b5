"""Random traffic, cut at random: what comes out is what went in, in order, once, whatever carries it."""

from __future__ import annotations

import hashlib
import random
import socket
import threading
import time

import pytest

from kernel_steer.ports import Mode
from tests.kernel_steer.ports.stand import Client, HttpNode, Node, Reader, Stand, pattern, request

REQUESTS = 120


def _pieces(rng: random.Random, data: bytes) -> list[bytes]:
    """The same bytes in segments: mostly few, sometimes single bytes."""
    largest = rng.choice((1 if len(data) < 2000 else 50, 100, 1500, 20000, 100000, 100000))
    pieces, at = [], 0
    while at < len(data):
        step = rng.randint(1, largest)
        pieces.append(data[at : at + step])
        at += step
    return pieces


def _chunked(rng: random.Random, body: bytes) -> bytes:
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in _pieces(rng, body)]
    return b"".join(chunks) + b"0\r\n" + b"X-Trailer: x\r\n" * rng.choice((0, 0, 0, 1)) + b"\r\n"


class _Fuzzy(HttpNode):
    """Answers each request with what it got, padded and cut at random."""

    def respond(self, sock: socket.socket, reader: Reader, method: str, path: str, body: bytes) -> bool:
        rng = random.Random(f"{self.key.name}{path}")
        said = path.encode() + hashlib.sha256(body).digest() + pattern(rng.choice((0, 10, 700, 9000, 150000)))
        if method == "HEAD":
            answer = self.head(f"Content-Length: {len(said)}\r\n")
        elif rng.random() < 0.5:
            answer = self.head(f"Content-Length: {len(said)}\r\n") + said
        else:
            answer = self.head("Transfer-Encoding: chunked\r\n") + _chunked(rng, said)
        if rng.random() < 0.1:
            answer = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + answer
        for piece in _pieces(rng, answer):
            self.send(sock, piece)
        return True


def _make(rng: random.Random, number: int) -> tuple[str, bytes, bytes]:
    """A request: its method, its body, and its bytes."""
    method = rng.choice(("GET", "HEAD", "POST", "POST", "POST", "PUT"))
    more = rng.choice(
        ("", "", "", "X-Long: " + "l" * rng.randint(1, 4000) + "\r\n", "Connection: keep-alive\r\n")
    )
    if method in ("GET", "HEAD"):
        return method, b"", request(method, f"/{number}/", more=more)
    body = pattern(rng.choice((0, 1, 50, 3000, 70000)))
    if rng.random() < 0.5:
        return method, body, request(method, f"/{number}/", body, more)
    head = request(method, f"/{number}/", more=more + "Transfer-Encoding: chunked\r\n")
    return method, body, head + _chunked(rng, body)


@pytest.mark.parametrize("seed", range(4))
def test_http(stand: Stand, seed: int):
    rng = random.Random(seed)
    a, b = stand.node(_Fuzzy, "a"), stand.node(_Fuzzy, "b")
    stand.open(Mode.HTTP, a, b)
    client = stand.client()
    made = [_make(rng, number) for number in range(REQUESTS)]
    at = 0
    while at < len(made):
        if rng.random() < 0.3:
            (stand.flip if rng.random() < 0.5 else stand.restore)(a)
        batch = made[at : at + rng.choice((1, 1, 1, 1, 2, 5))]
        sender = threading.Thread(target=_send, args=(rng, client, b"".join(raw for _, _, raw in batch)))
        sender.start()
        for number, (method, body, _) in enumerate(batch, at):
            _check(rng, client, number, method, body)
        sender.join()
        at += len(batch)
    heard = sorted(int(path[1:-1]) for node in (a, b) for _, path, _ in node.heard)
    assert heard == list(range(REQUESTS)), "a request was lost or doubled"
    if stand.is_kernel:
        assert stand.link.redirected(stand.connections[0].client) > 0, "the kernel carried nothing"


def _send(rng: random.Random, client: Client, data: bytes) -> None:
    for piece in _pieces(random.Random(len(data)), data):
        client.send(piece)


def _check(rng: random.Random, client: Client, number: int, method: str, body: bytes) -> None:
    status, headers, got = client.response(bare=method == "HEAD")
    while status == 103:
        status, headers, got = client.response(bare=method == "HEAD")
    assert status == 200
    path = f"/{number}/"
    if method != "HEAD":
        padding = random.Random(f"{headers['x-node']}{path}").choice((0, 10, 700, 9000, 150000))
        assert got == path.encode() + hashlib.sha256(body).digest() + pattern(padding)
    if rng.random() < 0.05:
        time.sleep(0.002)  # a reader that takes its time


class _Mirror(Node):
    def serve(self, sock: socket.socket) -> None:
        rng = random.Random(7)
        while data := sock.recv(rng.choice((100, 3000, 65536))):
            self.send(sock, data)
        sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("seed", range(2))
def test_tcp(stand: Stand, seed: int):
    rng = random.Random(seed)
    a, b = stand.node(_Mirror, "a"), stand.node(_Mirror, "b")
    stand.open(Mode.TCP, a, b, idle_ms=250)  # a busy machine may well take 100 ms for a byte
    client = stand.client()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rng.choice((16384, 1 << 20)))
    for _ in range(20):
        (stand.flip if rng.random() < 0.5 else stand.restore)(rng.choice((a, b)))
        data = pattern(rng.choice((1, 200, 9000, 60000)))
        sender = threading.Thread(target=_send, args=(rng, client, data))
        sender.start()
        assert client.exactly(len(data)) == data
        sender.join()
        if rng.random() < 0.2:
            time.sleep(0.3)  # idle: it may move
    client.sock.shutdown(socket.SHUT_WR)
    assert client.rest() == b""
