"""The far ends of many flows, in a process of their own: one process may not open so many files."""

from __future__ import annotations

import multiprocessing
import resource
import socket
from multiprocessing.connection import Connection


def files_allowed() -> int:
    """Takes what the system allows to one process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Ends:
    """Clients and nodes, connected in pairs: `accept` gives the near ends of the next one."""

    def __init__(self, count: int) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=4096) for _ in range(2)]
        ports = [listener.getsockname()[1] for listener in self._listeners]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, ports, count), daemon=True)
        self._process.start()

    def accept(self) -> tuple[socket.socket, socket.socket]:
        """(client's, node's)"""
        near = [listener.accept()[0] for listener in self._listeners]
        for sock in near:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return near[0], near[1]

    def send(self, data: bytes) -> None:
        """From every node. Returns when all have."""
        self._pipe.send(("send", data))
        self._pipe.recv()

    def received(self, count: int) -> set[bytes]:
        """What clients got, each waited for until it has so many bytes or nothing more comes."""
        self._pipe.send(("receive", count))
        got: set[bytes] = self._pipe.recv()
        return got

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()
        for listener in self._listeners:
            listener.close()


def _run(pipe: Connection, ports: list[int], count: int) -> None:
    files_allowed()
    clients, nodes = [], []
    for _ in range(count):
        for ends, port in zip((clients, nodes), ports, strict=True):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(30)
            ends.append(sock)
    while True:
        match pipe.recv():
            case "send", data:
                for node in nodes:
                    node.sendall(data)
                pipe.send(None)
            case "receive", length:
                pipe.send({_receive(client, length) for client in clients})


def _receive(sock: socket.socket, length: int) -> bytes:
    got = b""
    while len(got) < length:
        try:
            piece = sock.recv(65536)
        except TimeoutError:
            break
        if not piece:
            break
        got += piece
    return got
