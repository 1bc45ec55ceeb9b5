"""A gateway with one steered port, its nodes and its clients, for tests in plain blocking code.

The gateway's event loop runs in a thread of its own, so a test can stop it (`frozen`) and see what the
kernel does alone. Nodes are threads that speak HTTP or echo bytes, as real ones would.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvloop

from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.kernel import KernelEngine
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.ports import Backend, Endpoint, Mode, PortServer, PortStats, Timeouts
from kernel_steer.ports.link import Link

PATIENCE_S = 30.0
QUICK = Timeouts(connect_s=10.0, linger_s=0.5, mend_s=0.02)


def until(condition: Callable[[], Any], what: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in time"
        time.sleep(0.001)


def reset(sock: socket.socket) -> None:
    """Closes with RST."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Node:
    """Listens on loopback. Each connection runs `serve` in a thread."""

    def __init__(self, name: str, *, host: str = "127.0.0.1", epoch: int = 1) -> None:
        self.key = NodeKey(name, epoch)
        self.heard: list[tuple[str, str, bytes]] = []  # requests: method, path, body
        self.received = 0  # bytes
        self.sent = 0
        self.connections: list[socket.socket] = []
        self.gone = 0  # connections that have ended
        self.resets = False  # instead of closing
        self._lock = threading.Lock()
        self.go_on = threading.Event()  # what /hold waits for
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host, 0))
        self._listener.listen(1024)
        self.host, self.port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def backend(self) -> Backend:
        return Backend(self.key, self.host, self.port)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.connections.append(sock)
                threading.Thread(target=self._run, args=(sock,), daemon=True).start()

    def _run(self, sock: socket.socket) -> None:
        with suppress(OSError, EOFError):
            self.serve(sock)
        sock.close()
        with self._lock:
            self.gone += 1

    def serve(self, sock: socket.socket) -> None:
        raise NotImplementedError

    def send(self, sock: socket.socket, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = sock.send(view)
            self.sent += count
            view = view[count:]

    def stop(self) -> None:
        """As when its process is killed."""
        self._stop_listening()
        for sock in self.connections:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.go_on.set()

    def die(self) -> None:
        """As when its machine answers with resets."""
        self._stop_listening()
        self.resets = True
        for sock in self.connections:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)  # says nothing, but wakes a thread that reads
            sock.close()
        self.go_on.set()

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()


class Reader:
    """Buffered reading from a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()

    def fill(self) -> None:
        """Raises EOFError."""
        data = self.sock.recv(65536)
        if not data:
            raise EOFError
        self.buffer += data

    def line(self) -> bytes:
        return self.until(b"\r\n")

    def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            self.fill()
        at = self.buffer.index(mark)
        found = bytes(self.buffer[:at])
        del self.buffer[: at + len(mark)]
        return found

    def exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            self.fill()
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    def rest(self) -> bytes:
        """Up to the end."""
        with suppress(EOFError):
            while True:
                self.fill()
        return self.exactly(len(self.buffer))

    def head(self) -> tuple[str, dict[str, str]]:
        first, *lines = self.until(b"\r\n\r\n").decode().split("\r\n")
        return first, {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}

    def body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.line().split(b";")[0], 16):
                body += self.exactly(size)
                assert self.exactly(2) == b"\r\n"
            while self.line():
                pass  # trailers
            return body
        return self.exactly(int(headers.get("content-length", 0)))


class HttpNode(Node):
    """Answers by path; the response names the node."""

    def serve(self, sock: socket.socket) -> None:
        reader = Reader(sock)
        while True:
            first, headers = reader.head()
            method, path, _ = first.split(" ")
            if path == "/refuse":  # before the body
                self.answer(sock, b"no", status="413 Too Large", more="X: y\r\n")
            if headers.get("expect") == "100-continue":
                self.send(sock, b"HTTP/1.1 100 Continue\r\n\r\n")
            body = reader.body(headers)
            self.heard.append((method, path, body))
            if path == "/refuse":
                continue
            if not self.respond(sock, reader, method, path, body):
                return

    def respond(self, sock: socket.socket, reader: Reader, method: str, path: str, body: bytes) -> bool:
        kind, _, argument = path[1:].partition("/")
        match kind:
            case "bytes":
                self.answer(sock, pattern(int(argument)))
            case "chunked":
                self.send(sock, self.head("Transfer-Encoding: chunked\r\n"))
                for n in range(int(argument)):
                    piece = pattern(1 + n * 37 % 900)
                    self.send(sock, b"%x\r\n%b\r\n" % (len(piece), piece))
                self.send(sock, b"0\r\n\r\n")
            case "hold":
                piece = b"x" * 100
                self.send(sock, self.head("Content-Length: 200\r\n") + piece)
                assert self.go_on.wait(PATIENCE_S)
                self.send(sock, piece)
            case "stall":
                assert self.go_on.wait(PATIENCE_S)
                self.answer(sock, b"late")
            case "dribble":
                whole = (
                    self.head("Transfer-Encoding: chunked\r\n") + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
                )
                for at in range(len(whole)):
                    self.send(sock, whole[at : at + 1])
            case "until-close":
                self.send(sock, self.head("") + pattern(int(argument)))
                return False
            case "last":
                self.answer(sock, b"bye", more="Connection: close\r\n")
                return False
            case "status":
                more = "Content-Length: 77\r\n" if argument == "304" else ""
                self.send(sock, f"HTTP/1.1 {argument} X\r\nX-Node: {self.key.name}\r\n{more}\r\n".encode())
            case "upgrade":
                self.send(
                    sock, b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: upgrade\r\n\r\n"
                )
                self.send(sock, bytes(reader.buffer))
                echo(self, sock)
                return False
            case "drop":
                return False
            case "half" if self.key.name == "a":  # of a head
                self.send(sock, b"HTTP/1.1 200 OK\r\nX-Node: a\r\nContent-Le")
                return False
            case _:
                self.answer(sock, body, empty=method == "HEAD")
        return True

    def head(self, more: str, status: str = "200 OK") -> bytes:
        return f"HTTP/1.1 {status}\r\nX-Node: {self.key.name}\r\n{more}\r\n".encode()

    def answer(
        self, sock: socket.socket, body: bytes, *, status: str = "200 OK", more: str = "", empty: bool = False
    ) -> None:
        head = self.head(f"Content-Length: {len(body)}\r\n{more}", status)
        self.send(sock, head if empty else head + body)


class EchoNode(Node):
    """Sends back what it gets, after a byte that names it."""

    greeting = b""

    def serve(self, sock: socket.socket) -> None:
        if self.greeting:
            self.send(sock, self.greeting)
        echo(self, sock, mark=self.key.name[-1].encode())


def echo(node: Node, sock: socket.socket, *, mark: bytes = b"") -> None:
    while data := sock.recv(65536):
        node.received += len(data)
        node.send(sock, mark + data)
    if not node.resets:
        sock.shutdown(socket.SHUT_WR)


def pattern(count: int) -> bytes:
    """Bytes that show when some are lost, doubled or out of order."""
    return array("I", range(count // 4 + 1)).tobytes()[:count]


class Client(Reader):
    """A client of the steered port, blocking."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(socket.create_connection(address, timeout=PATIENCE_S))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def request(self, method: str, path: str, body: bytes | None = None, more: str = "") -> None:
        self.send(request(method, path, body, more))

    def response(self, *, bare: bool = False) -> tuple[int, dict[str, str], bytes]:
        """`bare`: without a body, whatever the head says."""
        first, headers = self.head()
        return int(first.split(" ")[1]), headers, b"" if bare else self.body(headers)

    def ask(self, body: bytes = b"?", path: str = "/") -> str:
        """The name of the node that answers."""
        self.request("POST", path, body)
        status, headers, got = self.response()
        assert (status, got) == (200, body)
        return headers["x-node"]

    def is_at_end(self) -> bool:
        """The gateway has closed, in whatever way, and nothing more came."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


def request(method: str, path: str, body: bytes | None = None, more: str = "") -> bytes:
    length = "" if body is None else f"Content-Length: {len(body)}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: port\r\n{length}{more}\r\n".encode() + (body or b"")


class Stand:
    """The gateway's side, in a thread."""

    def __init__(
        self, engine: str, *, host: str = "127.0.0.1", timeouts: Timeouts = QUICK, links_max: int = 64
    ) -> None:
        self._host = host
        self.loop = uvloop.new_event_loop()  # as in the gateway
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = KernelEngine(flows_max=1) if engine == "kernel" else RelayEngine()
        self.server = PortServer(self.engine, host=host, timeouts=timeouts, links_max=links_max)
        self.nodes: list[Node] = []
        self.clients: list[Client] = []

    @property
    def is_kernel(self) -> bool:
        return isinstance(self.engine, KernelEngine)

    def wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def node(self, kind: type[Node], name: str, **options: Any) -> Any:
        node = kind(name, host=self._host, **options)
        self.nodes.append(node)
        return node

    def open(self, mode: Mode, primary: Node | None, standby: Node | None = None, **options: Any) -> None:
        """Opens or changes the port."""
        endpoint = Endpoint(
            "port",
            0,
            mode,
            primary.backend if primary else None,
            standby.backend if standby else None,
            **options,
        )
        self.wait(self.server.apply([endpoint]))

    def http(self, **options: Any) -> tuple[HttpNode, HttpNode]:
        a, b = self.node(HttpNode, "a"), self.node(HttpNode, "b")
        self.open(Mode.HTTP, a, b, **options)
        return a, b

    def tcp(self, **options: Any) -> tuple[EchoNode, EchoNode]:
        a, b = self.node(EchoNode, "a"), self.node(EchoNode, "b")
        self.open(Mode.TCP, a, b, **options)
        return a, b

    def client(self) -> Client:
        client = Client((self._host, self.server.number_of("port")))
        self.clients.append(client)
        return client

    def settled_client(self) -> Client:
        """Both nodes are connected, and with the kernel engine it is the kernel that carries."""
        before = self.stats.accepted
        client = self.client()
        until(lambda: self.stats.accepted > before and len(self.connections[-1].backends) == 2, "connected")
        if self.is_kernel:
            until(lambda: self.link.is_open, "the kernel carries")
        return client

    @property
    def connections(self) -> list[Any]:
        return list(self.server._ports["port"]._connections.values())

    @property
    def link(self) -> Link:
        """Of the newest connection."""
        link = self.connections[-1].link
        assert link is not None
        return link

    @property
    def stats(self) -> PortStats:
        return self.server.stats

    def flip(self, node: Node) -> None:
        self.engine.flip(node.key)

    def restore(self, node: Node) -> None:
        self.engine.restore(node.key)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The gateway's Python does nothing in here."""
        stopped, go_on = threading.Event(), threading.Event()

        def stop() -> None:
            stopped.set()
            go_on.wait(PATIENCE_S)

        self.loop.call_soon_threadsafe(stop)
        assert stopped.wait(PATIENCE_S)
        try:
            yield
        finally:
            go_on.set()

    def close(self) -> None:
        for client in self.clients:
            client.sock.close()
        self.wait(self.server.close())
        for node in self.nodes:
            node.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()
        self.engine.close()
