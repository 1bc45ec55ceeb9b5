"""Live connections that ask now and then, and look at every byte of every answer."""

from __future__ import annotations

import select
import socket
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from kernel_steer.measure.backend import NAME_AT, answer, request

_SIZES = (200, 200, 200, 200, 200, 200, 200, 20_000)
_PER_SOURCE = 20_000  # connections from one loopback address: it has some 28,000 ports
_LAST_ANSWERS_S = 5.0
_PATIENCE_S = 20.0


@dataclass(slots=True)
class Seen:
    """What became of the answers."""

    connections: int = 0
    answers: int = 0
    by_standby: int = 0
    resets: int = 0  # connections that ended
    bytes_lost: int = 0
    bytes_duplicated: int = 0


class _Client:
    """One connection; at most one question is open."""

    def __init__(self, number: int, address: tuple[str, int]) -> None:
        source = f"127.0.{1 + number // _PER_SOURCE}.1"
        self.sock = socket.create_connection(address, source_address=(source, 0))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.path = ""  # of the open question
        self.got = b""
        self._number = number
        self._asked = 0

    def ask(self) -> None:
        self._asked += 1
        self.path = f"/{self._number}/{self._asked}/{_SIZES[self._asked % len(_SIZES)]}"
        self.sock.sendall(request(self.path))


class Load:
    """`count` connections to a port of this machine, made beforehand."""

    def __init__(self, port: int, count: int, first: int = 0) -> None:
        self.seen = Seen(connections=count)
        self._poll = select.epoll()
        self._clients: dict[int, _Client] = {}
        for number in range(first, first + count):
            client = _Client(number, ("127.0.0.1", port))
            self._clients[client.sock.fileno()] = client
            self._poll.register(client.sock, select.EPOLLIN)
        self._turn = list(self._clients.values())
        self._next = 0

    def warm(self) -> None:
        """One question each. Raises TimeoutError."""
        for client in self._turn:
            client.ask()
            self._read(0)
        deadline = time.monotonic() + _PATIENCE_S
        while self.open_questions:
            if time.monotonic() > deadline:
                raise TimeoutError("connections got no answer")
            self._read(0.1)

    @property
    def open_questions(self) -> int:
        return sum(bool(client.path) for client in self._clients.values())

    def run(self, per_s: float, until: Connection) -> None:
        """Asks `per_s` questions a second, one connection after the other, until something comes in."""
        due = time.monotonic()
        while not until.poll(0):
            now = time.monotonic()
            if now >= due:
                due = max(due + 1 / per_s, now - 0.1)
                self._ask_next()
            self._read(max(0.0, due - now))

    def _ask_next(self) -> None:
        client = self._turn[self._next % len(self._turn)]
        self._next += 1
        if not client.path and client.sock.fileno() in self._clients:
            try:
                client.ask()
            except OSError:
                self._lose(client)

    def finish(self) -> Seen:
        """Waits for the last answers; what is missing then is lost."""
        deadline = time.monotonic() + _LAST_ANSWERS_S
        while self.open_questions and time.monotonic() < deadline:
            self._read(0.1)
        for client in list(self._clients.values()):
            if client.path:
                self.seen.bytes_lost += max(1, len(answer("a", client.path)) - len(client.got))
            client.sock.close()
        return self.seen

    def _read(self, timeout_s: float) -> None:
        for fd, _ in self._poll.poll(timeout_s):
            client = self._clients[fd]
            try:
                data = client.sock.recv(65536)
            except OSError:
                data = b""
            if data:
                self._take(client, data)
            else:
                self._lose(client)

    def _lose(self, client: _Client) -> None:
        self.seen.resets += 1
        if client.path:
            self.seen.bytes_lost += len(answer("a", client.path)) - len(client.got)
        self._poll.unregister(client.sock)
        del self._clients[client.sock.fileno()]
        client.sock.close()

    def _take(self, client: _Client, data: bytes) -> None:
        client.got += data
        if not client.path:  # nothing was asked
            self.seen.bytes_duplicated += len(data)
            client.got = b""
            return
        node = client.got[NAME_AT : NAME_AT + 1].decode(errors="replace")
        expected = answer(node, client.path)
        if len(client.got) < len(expected):
            return
        extra = len(client.got) - len(expected)
        self.seen.bytes_duplicated += extra
        same = client.got[: len(expected)] == expected
        self.seen.bytes_lost += 0 if same else _first_difference(client.got, expected)
        self.seen.answers += 1
        self.seen.by_standby += node == "b"
        client.path, client.got = "", b""


def _first_difference(got: bytes, expected: bytes) -> int:
    """Bytes from the first wrong one to the end."""
    at = next(place for place, (one, other) in enumerate(zip(got, expected, strict=False)) if one != other)
    return len(expected) - at


def run_load(pipe: Connection, port: int, count: int, per_s: float, first: int = 0) -> None:
    """Target of a process. Says "ready"; asks from "go" to "rest", and at "stop" says what it has seen."""
    load = Load(port, count, first)
    load.warm()
    pipe.send("ready")
    while (order := pipe.recv()) != "stop":
        if order == "go":
            load.run(per_s, pipe)
    pipe.send(asdict(load.finish()))
