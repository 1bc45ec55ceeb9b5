"""What the kernel knows of a TCP connection."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from typing import NamedTuple

_SO_COOKIE = 57
_SO_SNDBUFFORCE = 32
_INFO_BYTES = 128  # up to and with tcpi_bytes_acked, in every kernel since 4.1
_AT_BYTES_ACKED = 120
_U64 = struct.Struct("=Q")
_U32 = struct.Struct("=I")
_ESTABLISHED, _CLOSE_WAIT = 1, 8
_TCP_ULP = 31
_TRIES = 100


class Progress(NamedTuple):
    """`accepted` counts everything that was ever given to this TCP, up to a constant."""

    accepted: int
    unacked: int  # of it, not yet confirmed by the peer
    alive: bool


def progress(sock: socket.socket) -> Progress:
    """Raises OSError."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    for _ in range(_TRIES):
        # Two calls are no snapshot: an ACK between them would count its bytes twice or not at all.
        unacked = _U32.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
        again = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if again[_AT_BYTES_ACKED:] == info[_AT_BYTES_ACKED:]:
            break
        info = again
    (acked,) = _U64.unpack_from(again, _AT_BYTES_ACKED)
    return Progress(acked + unacked, unacked, again[0] in (_ESTABLISHED, _CLOSE_WAIT))


def unacked(sock: socket.socket) -> int:
    """Bytes given to this TCP and not yet confirmed by the peer. Raises OSError."""
    return int(_U32.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


def wait_for_its_lock(sock: socket.socket) -> None:
    """After this call every verdict that had begun on the socket has ended: both take the socket's lock."""
    sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)


def cookie(sock: socket.socket) -> bytes:
    """The kernel's own name of the socket, never used twice: the key of every map."""
    return sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)


def is_plain_tcp(sock: socket.socket) -> bool:
    """No Unix socket, no MPTCP, no upper layer protocol such as kernel TLS."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    try:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) != socket.IPPROTO_TCP:
            return False
        return not sock.getsockopt(socket.IPPROTO_TCP, _TCP_ULP, 16).strip(b"\0")
    except OSError:
        return False


def limit_send_buffer(sock: socket.socket, *, queued_max: int, unsent_max: int) -> None:
    """Limits, not allocations: memory of the send queue, and bytes in it that the peer has no window for.

    May go beyond the system's usual limit, which needs CAP_NET_ADMIN. Raises OSError.
    """
    sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, queued_max // 2)  # the kernel doubles it
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_max)
