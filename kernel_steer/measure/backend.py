"""A small HTTP/1.1 server that names itself in every answer, and what each answer must be.

`GET /CONNECTION/NUMBER/SIZE` is answered by SIZE bytes that repeat the path and the server's name, so a reader
knows of every byte whose it is.
"""

from __future__ import annotations

import select
import socket
from multiprocessing.connection import Connection

NODES = ("a", "b")  # the primary and its standby


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()


def answer(node: str, path: str) -> bytes:
    """All of it, head and body."""
    size = int(path.rpartition("/")[2])
    unit = f"{node}{path} ".encode()
    body = (unit * (size // len(unit) + 1))[:size]
    return f"HTTP/1.1 200 OK\r\nx-node: {node}\r\ncontent-length: {size}\r\n\r\n".encode() + body


# Where an answer has the name, for those who cannot wait for the rest of it.
NAME_AT = answer(NODES[0], "/0/0/1").index(b"x-node: ") + 8
assert answer(NODES[1], "/0/0/99999")[NAME_AT : NAME_AT + 1] == NODES[1].encode()


def run_backend(pipe: Connection, node: str) -> None:
    """Target of a process; sends its port and serves until it is killed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=8192)
    listener.setblocking(False)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    clients: dict[int, tuple[socket.socket, bytearray]] = {}
    pipe.send(listener.getsockname()[1])
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                client, _ = listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                poll.register(client, select.EPOLLIN)
                clients[client.fileno()] = client, bytearray()
                continue
            client, waiting = clients[fd]
            if not _serve(node, client, waiting):
                del clients[fd]
                client.close()


def _serve(node: str, client: socket.socket, waiting: bytearray) -> bool:
    """Answers the requests that are complete; false when the client has gone."""
    try:
        data = client.recv(65536, socket.MSG_DONTWAIT)
        if not data:
            return False
        waiting += data
        while (end := waiting.find(b"\r\n\r\n")) >= 0:
            path = waiting[4 : waiting.index(b" ", 4)].decode()
            del waiting[: end + 4]
            client.sendall(answer(node, path))  # blocks at worst until the reader has room
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True
