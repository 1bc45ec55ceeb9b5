"""The contract of a steered TCP port, the same on both engines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from kernel_steer.ports import Mode
from tests.kernel_steer.ports.stand import Client, EchoNode, Node, Stand, pattern, reset, until

IDLE_MS = 60
BUSY = 60_000  # never idle within a test


def _ask(client: Client, body: bytes) -> str:
    """The node that echoes. Every segment of the echo begins with its name, so bodies stay small."""
    client.send(body)
    got = client.exactly(1 + len(body))
    assert got[1:] == body
    return got[:1].decode()


def _idle() -> None:
    """The silence that a flip waits for."""
    time.sleep(2 * IDLE_MS / 1000)


class TestBytes:
    def test_they_come_back_in_order(self, stand: Stand):
        stand.tcp()
        client = stand.settled_client()
        assert {_ask(client, pattern(n * 7 + 1)) for n in range(100)} == {"a"}

    def test_both_ways_at_once(self, stand: Stand):
        """More than fits into all buffers: whoever stops reading while it writes would stop for ever."""
        node = stand.node(_Mirror, "a")
        stand.open(Mode.TCP, node)
        client = stand.client()
        total = 12_000_000
        sender = threading.Thread(target=client.send, args=(pattern(total),))
        sender.start()
        assert client.exactly(total) == pattern(total)
        sender.join()

    def test_end_of_the_client_is_passed_on(self, stand: Stand):
        a, _ = stand.tcp()
        client = stand.settled_client()
        client.send(b"last")
        client.sock.shutdown(socket.SHUT_WR)
        assert client.rest() == b"alast"
        until(lambda: a.gone == 1, "the node sees the end")
        until(lambda: stand.stats.open == 0, "closed")

    def test_end_of_a_busy_node_is_passed_on(self, stand: Stand):
        a, b = stand.tcp(idle_ms=BUSY)
        client = stand.settled_client()
        assert _ask(client, b"x") == "a"
        a.stop()
        assert client.is_at_end()
        assert b.received == 0

    def test_reset_of_the_client_is_passed_on(self, stand: Stand):
        a, b = stand.tcp()
        client = stand.settled_client()
        assert _ask(client, b"x") == "a"
        reset(client.sock)
        until(lambda: a.gone == b.gone == 1, "the nodes see it")

    def test_reset_of_a_busy_node_is_passed_on(self, stand: Stand):
        a, _ = stand.tcp(idle_ms=BUSY)
        client = stand.settled_client()
        assert _ask(client, b"x") == "a"
        a.die()
        try:
            assert client.sock.recv(1) == b"", "made up"
        except ConnectionResetError:
            return
        raise AssertionError("a reset looks like an end")

    def test_slow_reader_loses_nothing(self, stand: Stand):
        a = stand.node(_Mirror, "a")
        stand.open(Mode.TCP, a)
        client = stand.client()
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        total = 4_000_000
        sender = threading.Thread(target=client.send, args=(pattern(total),))
        sender.start()
        got = bytearray()
        while len(got) < total:
            got += client.sock.recv(1 << (len(got) % 13 + 4))
        sender.join()
        assert bytes(got) == pattern(total)

    def test_without_a_node_the_connection_ends(self, stand: Stand):
        a = stand.node(EchoNode, "a")
        a.stop()
        stand.open(Mode.TCP, a)
        assert stand.client().is_at_end()
        assert stand.stats.unserved == 1


class _Mirror(Node):
    """Sends back exactly what it gets, reading no further while it writes."""

    def serve(self, sock: socket.socket) -> None:
        while data := sock.recv(65536):
            self.received += len(data)
            self.send(sock, data)
        sock.shutdown(socket.SHUT_WR)


class TestFlips:
    def test_it_moves_when_idle_and_stays_until_it_must(self, stand: Stand):
        a, b = stand.tcp(idle_ms=IDLE_MS)
        client = stand.settled_client()
        assert _ask(client, b"x") == "a"
        stand.flip(a)
        _idle()
        assert _ask(client, b"y") == "b"
        stand.restore(a)
        _idle()
        assert _ask(client, b"z") == "b"
        stand.flip(b)
        _idle()
        assert _ask(client, b"z") == "a"
        until(lambda: stand.stats.moved == 2, "counted")

    def test_it_stays_while_busy(self, stand: Stand):
        a, _ = stand.tcp(idle_ms=BUSY)
        client = stand.settled_client()
        assert _ask(client, b"x") == "a"
        stand.flip(a)
        for n in range(20):
            assert _ask(client, pattern(n + 1)) == "a"

    def test_end_of_an_idle_node_is_not_missed(self, stand: Stand):
        for end in ("stop", "die"):
            a, _ = stand.tcp(idle_ms=IDLE_MS)
            client = stand.settled_client()
            assert _ask(client, b"x") == "a"
            _idle()
            getattr(a, end)()
            until(lambda: a.gone, "it is gone")  # noqa: B023
            assert _ask(client, b"y") == "b"
            client.sock.close()

    def test_what_a_standby_says_is_not_for_the_client(self, make_stand: Callable[..., Stand]):
        stand = make_stand()
        a, b = stand.node(_Greeter, "a"), stand.node(_Greeter, "b")
        stand.open(Mode.TCP, a, b, idle_ms=IDLE_MS)
        client = stand.settled_client()
        assert client.exactly(2) == b"hi"
        assert _ask(client, b"x") == "a"
        stand.flip(a)
        _idle()
        assert _ask(client, b"y") == "b"

    def test_other_nodes_under_an_open_connection(self, stand: Stand):
        a, b = stand.tcp(idle_ms=IDLE_MS)
        client = stand.settled_client()
        assert _ask(client, b"x") == "a"
        c = stand.node(EchoNode, "c")
        stand.open(Mode.TCP, b, c, idle_ms=IDLE_MS)
        stand.flip(a)
        _idle()
        assert _ask(client, b"y") == "b"
        until(lambda: a.gone == 1, "the old node is let go of")
        until(lambda: c.connections, "the new one is connected")


class _Greeter(EchoNode):
    greeting = b"hi"
