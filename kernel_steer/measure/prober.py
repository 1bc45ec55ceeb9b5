"""A client that always has the next request ready, and notes when another node begins to answer.

Between two requests it sleeps for the shortest time there is. It costs each figure up to a tenth of a millisecond;
without it the client, its node and the kernel's workers keep a processor busy, which those who carry the signal need.
"""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing.connection import Connection

from kernel_steer.measure.backend import NAME_AT, answer, request

_PATH = "/prober/0/100"
_BREATH_S = 0.00005


def run_prober(pipe: Connection, port: int) -> None:
    """Target of a process. On "go" it asks until "rest"; says (node, moment of its first byte in ns on
    CLOCK_MONOTONIC) whenever another one answers than before, and None in the end or when an answer was wrong."""
    going, ended = threading.Event(), threading.Event()

    def obey() -> None:
        while (order := pipe.recv()) != "stop":
            if order == "go":
                going.set()
            else:
                going.clear()
        ended.set()
        going.set()

    pipe.send("ready")
    threading.Thread(target=obey, daemon=True).start()
    question = request(_PATH)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        current = ""
        while going.wait() and not ended.is_set():
            time.sleep(_BREATH_S)
            sock.sendall(question)
            got = sock.recv(65536)
            first_ns = time.monotonic_ns()
            node = got[NAME_AT : NAME_AT + 1].decode(errors="replace")
            expected = answer(node, _PATH)
            while got and len(got) < len(expected):
                got += sock.recv(65536)
            if got != expected:
                break
            if node != current:
                current = node
                pipe.send((node, first_ns))
    pipe.send(None)
