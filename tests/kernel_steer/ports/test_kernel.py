"""What the kernel does with steered connections while the gateway's Python does nothing."""

from __future__ import annotations

import resource
import socket
import time

import pytest

from kernel_steer.engine.kernel import pins
from kernel_steer.ports import Mode, program
from kernel_steer.ports.layout import BACKENDS, CLIENT, LINK_BYTES, SEGMENTS_MAX, UNCONFIRMED_MAX, SideWord
from kernel_steer.ports.link import LinkUnavailable
from tests.kernel_steer.kernel_support import needs_kernel_engine
from tests.kernel_steer.ports.stand import HttpNode, Node, Stand, pattern, request, until

pytestmark = needs_kernel_engine


class TestAlone:
    def test_it_carries_requests(self, kernel_stand: Stand):
        kernel_stand.http()
        client = kernel_stand.settled_client()
        with kernel_stand.frozen():
            for n in range(100):
                assert client.ask(pattern(n * 30)) == "a"

    def test_it_carries_chunks_over_any_cut(self, kernel_stand: Stand):
        kernel_stand.http()
        client = kernel_stand.settled_client()
        body = b"3\r\nabc\r\n1F\r\n" + b"y" * 31 + b"\r\n0\r\n\r\n"
        head = request("POST", "/", more="Transfer-Encoding: chunked\r\n")
        with kernel_stand.frozen():
            for cut in range(len(body)):
                client.send(head + body[:cut])
                client.send(body[cut:])
                assert client.response()[2] == b"abc" + b"y" * 31
            client.send(head)
            for byte in body:
                client.send(bytes([byte]))
            assert client.response()[2] == b"abc" + b"y" * 31
            client.request("GET", "/chunked/100")
            assert client.response()[2] == b"".join(pattern(1 + n * 37 % 900) for n in range(100))
            assert client.ask() == "a"

    def test_it_understands_what_clients_write(self, kernel_stand: Stand):
        kernel_stand.http()
        client = kernel_stand.settled_client()
        with kernel_stand.frozen():
            for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "POST"):
                client.request(
                    method, "/x?y=z", b"body", more="connection: Keep-Alive\r\nUpgrade-Not: x\r\n" * 0
                )
                assert client.response()[2] == b"body"
            client.send(b"POST / HTTP/1.1\r\nCONTENT-LENGTH:4\r\nConnection: keep-alive\r\n\r\nbody")
            assert client.response()[2] == b"body"
            client.request("HEAD", "/")
            assert client.response(bare=True)[0] == 200
            client.request("GET", "/status/304")
            assert client.response(bare=True)[0] == 304
            client.request("POST", "/", b"x", more=f"X-Long: {'l' * 1800}\r\n")
            assert client.response()[2] == b"x"

    @pytest.mark.parametrize(
        "odd",
        [
            "Expect: 100-continue\r\n",
            "Connection: close\r\n",
            "Upgrade: h2c\r\n",
            f"X-Long: {'l' * 2100}\r\n",
            "X-Folded: a\r\n b\r\n",
            "Content-Length : 1\r\n",
        ],
    )
    def test_what_is_odd_waits_for_user_space(self, kernel_stand: Stand, odd: str):
        a, _ = kernel_stand.http()
        client = kernel_stand.settled_client()
        assert client.ask() == "a"
        until(lambda: kernel_stand.link.is_open, "the kernel carries")
        with kernel_stand.frozen():
            client.request("POST", "/", b"x", more=odd)
            until(lambda: kernel_stand.link._get(3, SideWord.PASSED), "it is passed")
            assert len(a.heard) == 1

    def test_flip_by_another_process(self, kernel_stand: Stand):
        a, _ = kernel_stand.http()
        client = kernel_stand.settled_client()
        maps = pins.NodeMaps()
        maps.refresh({kernel_stand.engine.pins})
        try:
            with kernel_stand.frozen():
                assert client.ask() == "a"
                assert maps.flip(a.key) == 1
                assert client.ask() == "b"
                assert maps.take_back(a.key) == 1
                assert client.ask() == "a"
        finally:
            maps.close()
        until(lambda: kernel_stand.stats.moved == 2, "counted")

    def test_request_and_response_stay_whole_through_a_flip(self, kernel_stand: Stand):
        a, _ = kernel_stand.http()
        client = kernel_stand.settled_client()
        whole = request("POST", "/", pattern(9000))
        with kernel_stand.frozen():
            client.send(whole[:5000])
            until(lambda: not kernel_stand.link.at_boundary, "it has begun")
            kernel_stand.flip(a)
            client.send(whole[5000:])
            _, headers, body = client.response()
            assert (headers["x-node"], body) == ("a", pattern(9000))
            assert client.ask() == "b"
            kernel_stand.restore(a)
            client.request("GET", "/hold")
            client.head()
            kernel_stand.flip(a)
            a.go_on.set()
            assert client.exactly(200) == b"x" * 200
            assert client.ask() == "b"

    @pytest.mark.parametrize("end", ["stop", "die"])
    @pytest.mark.parametrize("mode", list(Mode))
    def test_dead_node_is_seen(self, kernel_stand: Stand, mode: Mode, end: str):
        a, _b = kernel_stand.http() if mode is Mode.HTTP else kernel_stand.tcp(idle_ms=1)
        client = kernel_stand.settled_client()
        link = kernel_stand.link
        if mode is Mode.TCP:
            client.send(b"x")
            assert client.exactly(2) == b"ax"
            until(lambda: link.is_open and link.pinned == 1, "the kernel carries")
            time.sleep(0.005)
        with kernel_stand.frozen():
            getattr(a, end)()
            until(lambda: link.has_ended(link.ends[BACKENDS[0]]), "the kernel sees it")
            if mode is Mode.HTTP:
                assert client.ask() == "b"
            else:
                client.send(b"y")
                assert client.exactly(2) == b"by"

    def test_node_that_talks_out_of_turn_is_not_heard(self, kernel_stand: Stand):
        a, b = kernel_stand.http()
        client = kernel_stand.settled_client()
        with kernel_stand.frozen():
            assert client.ask() == "a"
            until(lambda: b.connections, "accepted")
            for node in (a, b):
                node.connections[0].send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
            until(lambda: all(kernel_stand.link._get(s, SideWord.PASSED) for s in BACKENDS), "it is passed")
        until(lambda: len(a.connections) == 2 and len(b.connections) == 2, "they are replaced")
        assert client.ask() in "ab"

    def test_bytes_that_came_twice_are_not_passed_on(self, kernel_stand: Stand):
        """Nobody can make TCP do that to order, so the program's note of it stands for it."""
        a, _ = kernel_stand.http()
        client = kernel_stand.settled_client()
        assert client.ask() == "a"
        kernel_stand.link._set(CLIENT, SideWord.OVERLAPS, 1)
        client.request("POST", "/", b"twice")
        assert client.is_at_end()
        client = kernel_stand.settled_client()
        client.request("GET", "/hold")
        client.head()
        until(lambda: kernel_stand.link.is_open and client.buffer, "the kernel carries")
        kernel_stand.link._set(BACKENDS[0], SideWord.OVERLAPS, 1)
        a.go_on.set()
        assert client.exactly(100) == b"x" * 100
        assert client.is_at_end()
        assert [path for _, path, _ in a.heard] == ["/", "/hold"]

    def test_standby_whose_bytes_came_twice_is_replaced(self, kernel_stand: Stand):
        _, b = kernel_stand.http()
        client = kernel_stand.settled_client()
        kernel_stand.link._set(BACKENDS[1], SideWord.OVERLAPS, 1)
        until(lambda: b.connections, "accepted")
        b.connections[0].send(b"?")
        until(lambda: len(b.connections) == 2, "it is replaced")
        assert client.ask() == "a"

    def test_what_is_under_way_is_bounded(self, kernel_stand: Stand):
        node = kernel_stand.node(_Flood, "a")
        kernel_stand.open(Mode.TCP, node)
        client = kernel_stand.client()
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(b"go")
        until(lambda: any(c.link for c in kernel_stand.connections), "accepted")
        link = kernel_stand.link
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            under_way = link._get(3, SideWord.REDIRECTED) + link._get(3, SideWord.WRITTEN)
            assert under_way - link._get(3, SideWord.CONFIRMED) <= UNCONFIRMED_MAX + 65536 * 2
            assert link._get(3, SideWord.SEGMENTS) - link._get(3, SideWord.CONFIRMED_SEGMENTS) <= SEGMENTS_MAX
        assert node.sent < 12_000_000


class _Flood(Node):
    def serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        sock.recv(2)
        while True:
            self.send(sock, b"z" * 300)


class TestFallback:
    def test_without_a_cgroup_user_space_hears_of_deaths(self, monkeypatch):
        def none() -> None:
            raise OSError("no cgroup2 hierarchy is mounted")

        monkeypatch.setattr(program, "own_cgroup", none)
        stand = Stand("kernel")
        try:
            a, b = stand.http()
            client = stand.settled_client()
            assert "no cgroup2" in stand.server.reason
            for n in range(2 * SEGMENTS_MAX):
                assert client.ask(b"%d" % n) == "a"
            assert stand.stats.to_user_space < SEGMENTS_MAX
            [connection] = stand.connections
            a.die()
            until(
                lambda: {end.backend.node for end in connection.backends.values()} == {b.key}, "it is dropped"
            )
            assert client.ask() == "b"
        finally:
            stand.close()

    def test_without_a_free_slot_user_space_carries(self):
        stand = Stand("kernel", links_max=1)
        try:
            stand.http()
            first, second = stand.settled_client(), stand.client()
            assert (first.ask(), second.ask()) == ("a", "a")
            assert sum(connection.link is not None for connection in stand.connections) == 1
            first.sock.close()
            until(lambda: stand.stats.open == 1, "closed")
            third = stand.settled_client()
            assert third.ask() == "a"
        finally:
            stand.close()

    def test_what_is_no_plain_tcp_is_refused(self, kernel_stand: Stand):
        kernel_stand.http()
        kernel_stand.settled_client()
        near, far = socket.socketpair()
        with near, far:
            from kernel_steer.ports.end import End

            with pytest.raises(LinkUnavailable):
                kernel_stand.server._kernel.open_link(End(near, stall_s=1), http=True, idle_ms=1)

    def test_slots_and_descriptors_come_back(self, kernel_stand: Stand):
        a, b = kernel_stand.http()
        kernel = None
        for _ in range(3 * 64):
            client = kernel_stand.client()
            assert client.ask() == "a"
            kernel = kernel_stand.server._kernel
            client.sock.close()
        until(lambda: kernel_stand.stats.open == 0, "closed")
        assert kernel is not None
        assert len(kernel._free) == 64
        assert kernel._by_fd == {}
        until(lambda: all(node.gone == len(node.connections) for node in (a, b)), "the nodes are let go of")


def test_a_slot_is_small():
    """docs/steering.md states it."""
    assert LINK_BYTES + 2048 == 2752
    assert resource.getpagesize() == 4096


class TestMany:
    def test_a_flip_is_one_write_for_all_of_them(self):
        stand = Stand("kernel", links_max=256)
        try:
            a = stand.node(HttpNode, "a")
            b = stand.node(HttpNode, "b")
            stand.open(Mode.HTTP, a, b)
            clients = [stand.client() for _ in range(200)]
            assert {client.ask() for client in clients} == {"a"}
            until(
                lambda: all(c.link.is_open and len(c.backends) == 2 for c in stand.connections), "all carried"
            )
            with stand.frozen():
                stand.flip(a)
                assert {client.ask() for client in clients} == {"b"}
        finally:
            stand.close()
