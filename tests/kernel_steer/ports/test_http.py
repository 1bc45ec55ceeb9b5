"""The contract of a steered HTTP port, the same on both engines."""

from __future__ import annotations

import socket
import time

import pytest

from kernel_steer.ports import Mode
from tests.kernel_steer.ports.stand import PATIENCE_S, HttpNode, Stand, pattern, request, reset, until


class TestRequests:
    def test_many_on_one_connection(self, stand: Stand):
        a, b = stand.http()
        client = stand.client()
        bodies = [pattern(n * 53) for n in range(60)]
        assert {client.ask(body) for body in bodies} == {"a"}
        assert [body for _, _, body in a.heard] == bodies
        assert b.heard == []

    def test_pipelined_ones_are_answered_in_order(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        bodies = [b"%d" % n for n in range(20)]
        client.send(b"".join(request("POST", "/", body) for body in bodies))
        assert [client.response()[2] for _ in bodies] == bodies
        assert client.ask(b"and on") == "a"

    def test_one_that_comes_during_a_response_waits(self, stand: Stand):
        a, _ = stand.http()
        client = stand.settled_client()
        client.request("GET", "/hold")
        until(lambda: a.heard, "the request is there")
        client.request("POST", "/", b"second")
        a.go_on.set()
        assert client.response()[2] == b"x" * 200
        assert client.response()[2] == b"second"

    def test_continue_is_waited_for(self, stand: Stand):
        _a, _ = stand.http()
        client = stand.settled_client()
        client.request("POST", "/", more="Content-Length: 5\r\nExpect: 100-continue\r\n")
        assert client.head()[0] == "HTTP/1.1 100 Continue"
        client.send(b"hello")
        assert client.response()[2] == b"hello"
        assert client.ask() == "a"

    def test_chunked_both_ways(self, stand: Stand):
        a, _ = stand.http()
        client = stand.settled_client()
        for cut in (1, 3, 7, 12, 30):
            body = b"5;note=x\r\nhello\r\n" * (cut == 7) + b"3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n"
            whole = request("POST", "/chunked/50", more="Transfer-Encoding: chunked\r\n") + body
            at = len(whole) - len(body) + cut  # in a chunk's size, its data, its end
            client.send(whole[:at])
            client.send(whole[at:])
            assert client.response()[2] == b"".join(pattern(1 + n * 37 % 900) for n in range(50))
        assert next(body for _, _, body in a.heard) == b"abc0123456789"

    def test_trailers(self, stand: Stand):
        _a, _ = stand.http()
        client = stand.settled_client()
        client.request("POST", "/", more="Transfer-Encoding: chunked\r\n")
        client.send(b"3\r\nabc\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n")
        assert client.response()[2] == b"abc"
        assert client.ask() == "a"

    def test_byte_by_byte(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        for byte in request("POST", "/dribble", b"body"):
            client.send(bytes([byte]))
        assert client.response()[2] == b"hello world"
        assert client.ask() == "a"

    @pytest.mark.parametrize("count", [65536, 3_000_000])
    def test_large_bodies(self, stand: Stand, count: int):
        stand.http()
        client = stand.settled_client()
        client.sock.settimeout(30)
        assert client.ask(pattern(count)) == "a"
        client.request("GET", f"/bytes/{count}")
        assert client.response()[2] == pattern(count)
        assert client.ask() == "a"

    def test_long_head(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        client.request("POST", "/", b"x", more=f"Cookie: {'c' * 9000}\r\n")
        assert client.response()[2] == b"x"
        assert client.ask() == "a"

    def test_responses_without_a_body(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        for method, path, status in (
            ("HEAD", "/", 200),
            ("GET", "/status/204", 204),
            ("GET", "/status/304", 304),
        ):
            client.request(method, path)
            assert client.response(bare=True)[0] == status
        assert client.ask() == "a"

    def test_early_response(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        client.request("POST", "/refuse", more="Content-Length: 100000\r\n")
        assert client.response()[0] == 413
        client.send(pattern(100000))
        assert client.ask() == "a"

    def test_upgrade_becomes_a_tunnel_that_no_flip_cuts(self, stand: Stand):
        a, _ = stand.http()
        client = stand.settled_client()
        client.request("GET", "/upgrade", more="Connection: Upgrade\r\nUpgrade: echo\r\n")
        assert client.head()[0].startswith("HTTP/1.1 101")
        for n in range(20):
            if n == 10:
                stand.flip(a)
            client.send(pattern(n * 700))
            assert client.exactly(n * 700) == pattern(n * 700)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.rest() == b""

    def test_ipv6(self, make_stand):
        stand = make_stand(host="::1")
        a, _b = stand.http()
        client = stand.settled_client()
        assert client.ask(pattern(5000)) == "a"
        stand.flip(a)
        assert client.ask(pattern(5000)) == "b"


class TestEnds:
    def test_body_that_ends_with_the_connection(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        client.request("GET", "/until-close/300000")
        client.head()
        assert client.rest() == pattern(300000)

    def test_close_is_honoured(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        client.request("GET", "/last")
        assert client.response()[2] == b"bye"
        assert client.is_at_end()
        client = stand.settled_client()
        client.request("POST", "/", b"x", more="Connection: close\r\n")
        assert client.response()[2] == b"x"
        assert client.is_at_end()

    def test_client_that_closes_its_half_gets_its_answer(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        client.request("POST", "/", pattern(2000))
        client.sock.shutdown(socket.SHUT_WR)
        assert client.response()[2] == pattern(2000)
        assert client.is_at_end()

    def test_client_that_sent_everything_before_it_was_accepted(self, stand: Stand):
        stand.http()
        with stand.frozen():
            client = stand.client()
            client.request("POST", "/", b"early")
            client.sock.shutdown(socket.SHUT_WR)
        assert client.response()[2] == b"early"
        assert client.is_at_end()

    def test_client_that_goes_away_takes_its_nodes_connections_along(self, stand: Stand):
        a, b = stand.http()
        client = stand.settled_client()
        client.request("GET", "/hold")
        client.head()
        reset(client.sock)
        a.go_on.set()
        until(lambda: stand.stats.open == 0, "closed")
        until(lambda: a.gone == b.gone == 1, "the nodes see the end")

    def test_silent_client_that_leaves(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        assert client.ask() == "a"
        client.sock.close()
        until(lambda: stand.stats.open == 0, "closed")

    def test_slow_reader_holds_up_its_node_and_loses_nothing(self, stand: Stand):
        a, _ = stand.http()
        client = stand.settled_client()
        # Otherwise the system's own buffers, of some 6 MB each, are what is measured.
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        for sock in a.connections:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        total = 12_000_000
        client.request("GET", f"/bytes/{total}")
        client.head()
        assert _at_rest(a) < 6_000_000, "there is no bound to what is held for a client that reads nothing"
        assert client.exactly(total) == pattern(total)
        assert client.ask() == "a"

    def test_garbage_is_refused(self, stand: Stand):
        stand.http()
        for garbage in (
            b"nonsense\r\n\r\n",
            request("POST", "/", b"x", more="Transfer-Encoding: chunked\r\n"),
            request("POST", "/", b"x", more="Content-Length: 2\r\n"),
            request("POST", "/", more="Transfer-Encoding: gzip\r\n"),
            request("POST", "/", more="Transfer-Encoding: chunked\r\n") + b"zz\r\n",
        ):
            client = stand.settled_client()
            client.send(garbage)
            assert client.response()[0] == 400
            assert client.is_at_end()

    def test_no_more_connections_than_the_port_allows(self, stand: Stand):
        stand.http(connections_max=2)
        first, second = stand.settled_client(), stand.settled_client()
        assert stand.client().is_at_end()
        assert (first.ask(), second.ask()) == ("a", "a")
        assert stand.stats.refused == 1


def _at_rest(node: HttpNode) -> int:
    """What the node has got rid of when it gets rid of no more."""
    seen, since = -1, time.monotonic()
    deadline = since + PATIENCE_S
    while time.monotonic() < min(deadline, since + 0.5):
        if node.sent != seen:
            seen, since = node.sent, time.monotonic()
        time.sleep(0.01)
    return seen


class TestFlips:
    def test_the_next_request_goes_to_the_standby_and_back(self, stand: Stand):
        a, _b = stand.http()
        client = stand.settled_client()
        assert client.ask() == "a"
        stand.flip(a)
        assert client.ask() == "b"
        stand.restore(a)
        assert client.ask() == "a"
        until(lambda: stand.stats.moved == 2, "counted")

    def test_request_under_way_stays_whole(self, stand: Stand):
        a, _b = stand.http()
        client = stand.settled_client()
        whole = request("POST", "/", pattern(50000))
        client.send(whole[:20000])
        until(lambda: _bytes_at(stand, a), "it has begun")
        stand.flip(a)
        client.send(whole[20000:])
        _, headers, body = client.response()
        assert (headers["x-node"], body) == ("a", pattern(50000))
        assert client.ask() == "b"

    def test_response_under_way_stays_whole(self, stand: Stand):
        a, _ = stand.http()
        client = stand.settled_client()
        client.request("GET", "/hold")
        client.head()
        stand.flip(a)
        a.go_on.set()
        assert client.exactly(200) == b"x" * 200
        assert client.ask() == "b"

    def test_a_thousand(self, stand: Stand):
        a, b = stand.http()
        client = stand.settled_client()
        names = []
        for n in range(1000):
            (stand.flip if n % 2 == 0 else stand.restore)(a)
            names.append(client.ask(b"%d" % n))
        assert names == ["b", "a"] * 500
        assert [int(body) for _, _, body in b.heard] == list(range(0, 1000, 2))
        assert [int(body) for _, _, body in a.heard] == list(range(1, 1000, 2))

    def test_both_flipped_is_said(self, stand: Stand):
        a, b = stand.http()
        client = stand.settled_client()
        stand.flip(a)
        stand.flip(b)
        client.request("POST", "/", b"x")
        assert client.response()[0] == 503
        assert client.is_at_end()
        assert stand.stats.unserved == 1

    def test_other_nodes_under_an_open_connection(self, stand: Stand):
        a, b = stand.http()
        client = stand.settled_client()
        assert client.ask() == "a"
        c = stand.node(HttpNode, "c")
        stand.open(Mode.HTTP, b, c)
        assert client.ask() == "b"
        until(lambda: a.gone == 1, "the old node is let go of")
        until(lambda: c.connections, "the new one is connected")
        stand.flip(b)
        until(lambda: client.ask() == "c", "the new standby serves")

    def test_other_nodes_during_a_response(self, stand: Stand):
        a, b = stand.http()
        client = stand.settled_client()
        client.request("GET", "/hold")
        client.head()
        stand.open(Mode.HTTP, b)
        a.go_on.set()
        assert client.exactly(200) == b"x" * 200
        until(lambda: a.gone == 1, "the old node is let go of")
        assert client.ask() == "b"


def _bytes_at(stand: Stand, node: HttpNode) -> bool:
    """A part of a request is on its way to the node."""
    connection = stand.connections[-1]
    if connection.link is not None and connection.link.is_open:
        return not connection.link.at_boundary
    return any(end.written for end in connection.backends.values())


class TestLostNodes:
    def test_idle_one_is_not_missed(self, stand: Stand):
        a, _b = stand.http()
        client = stand.settled_client()
        assert client.ask() == "a"
        a.stop()
        assert client.ask() == "b"

    def test_it_is_connected_again_when_it_is_back(self, stand: Stand):
        a, _ = stand.http()
        client = stand.settled_client()
        assert client.ask() == "a"
        for sock in a.connections:
            sock.shutdown(socket.SHUT_RDWR)
        until(lambda: client.ask() == "a" and len(a.connections) > 1, "it serves again")

    @pytest.mark.parametrize("end", ["stop", "die"])
    def test_get_without_an_answer_is_asked_again(self, stand: Stand, end: str):
        a, b = stand.http()
        client = stand.settled_client()
        b.go_on.set()
        client.request("GET", "/stall")
        until(lambda: a.heard, "it is there")
        getattr(a, end)()
        assert client.response()[1:] == ({"x-node": "b", "content-length": "4"}, b"late")
        assert stand.stats.sent_again == 1

    def test_half_a_head_is_no_answer(self, stand: Stand):
        stand.http()
        client = stand.settled_client()
        client.request("GET", "/half")
        assert client.response() == (200, {"x-node": "b", "content-length": "0"}, b"")

    def test_post_without_an_answer_is_not(self, stand: Stand):
        _a, b = stand.http()
        client = stand.settled_client()
        client.request("POST", "/drop", b"charge me")
        status, _, body = client.response()
        assert status == 502
        assert b"node_lost" in body
        assert client.is_at_end()
        assert b.heard == []

    @pytest.mark.parametrize("path", ["/hold", "/chunked/400"])
    def test_cut_response_looks_cut(self, stand: Stand, path: str):
        a, _b = stand.http()
        client = stand.settled_client()
        client.request("GET", "/hold")
        client.head()
        assert client.exactly(100) == b"x" * 100
        for sock in a.connections:
            sock.shutdown(socket.SHUT_RDWR)
        assert client.is_at_end()
        until(lambda: stand.stats.cut == 1, "counted")

    def test_no_node_at_all(self, stand: Stand):
        a, b = stand.http()
        a.stop()
        b.stop()
        client = stand.client()
        client.request("POST", "/", b"x")
        assert client.response()[0] == 503

    def test_port_without_nodes_waits_for_its_configuration(self, stand: Stand):
        a = stand.node(HttpNode, "a")
        stand.open(Mode.HTTP, None)
        client = stand.client()
        client.request("POST", "/", b"x")
        assert client.response()[0] == 503
        stand.open(Mode.HTTP, a)
        assert stand.client().ask() == "a"
