"""The fast carrier: one packet straight to a gateway, over UDP or, on the same host, a unix socket.

Nothing is looked up and nothing is connected when a signal is sent. A packet may be lost; the stream
brings the signal then.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

from kernel_steer.signals.message import DATAGRAM_BYTES_MAX, Signal, SignalRefused

# A unix socket in Linux's abstract namespace: no file that a crash leaves behind, no folder that the
# node's user may not enter. Who may write to it does not matter, as signals are signed.
_LOCAL = "\0apex-steer-"


def local_name(gateway: str) -> str:
    """The abstract address of a gateway on this host."""
    return _LOCAL + gateway


class DatagramReceiver:
    """The sockets of one gateway. Bound when made; `host` and `port` are what UDP got.

    `port` 0 lets the system choose. Raises OSError when the address cannot be bound.
    """

    def __init__(self, gateway: str, key: bytes, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._key = key
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._sockets = [self._wake, self._woken]
        try:
            udp = self._bind(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port))
            self._bind(socket.AF_UNIX, local_name(gateway))
        except OSError:
            self.close()
            raise
        self.host, self.port = udp.getsockname()[:2]
        self._selector.register(self._woken, selectors.EVENT_READ)

    def _bind(self, family: int, address: tuple[str, int] | str) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_DGRAM)
        self._sockets.append(sock)
        sock.setblocking(False)
        sock.bind(address)
        self._selector.register(sock, selectors.EVENT_READ)
        return sock

    def read(self, on_refused: Callable[[SignalRefused], None]) -> Iterator[Signal]:
        """Yields verified signals until `stop`; sleeps in between. To be called by one thread."""
        while True:
            for ready, _ in self._selector.select():
                sock = ready.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._woken:
                    return
                try:
                    packet = sock.recv(DATAGRAM_BYTES_MAX + 1)
                except OSError:  # gone again, or the echo of an unreachable port
                    continue
                try:
                    signal = Signal.from_datagram(packet, self._key)
                except SignalRefused as refusal:
                    on_refused(refusal)
                    continue
                yield signal

    def stop(self) -> None:
        """Ends `read`. From any thread, also more than once."""
        with suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """After `read` has returned."""
        self._selector.close()
        for sock in self._sockets:
            sock.close()


class DatagramSender:
    """Ready-made sockets to one gateway. Not for two threads at a time."""

    def __init__(self, gateway: str, host: str, port: int) -> None:
        """Raises OSError when the address is none."""
        self._local_name = local_name(gateway)
        self._local: socket.socket | None = None
        self._udp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._udp.setblocking(False)
            self._udp.connect((host, port))
        except OSError:
            self._udp.close()
            raise
        self.warm()

    def warm(self) -> None:
        """Looks whether the gateway is on this host; to be repeated while nothing is to be sent."""
        if self._local is not None:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.setblocking(False)
        try:
            sock.connect(self._local_name)
        except OSError:  # on another host
            sock.close()
        else:
            self._local = sock

    def send(self, packet: bytes) -> bool:
        """Never waits. False when the system did not even take the packet; True promises nothing."""
        if self._local is not None:
            try:
                self._local.send(packet)
            except OSError:  # its queue is full, or it has ended
                pass
            else:
                return True
        try:
            self._udp.send(packet)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._udp.close()
        if self._local is not None:
            self._local.close()
