"""TLS connections to third parties: certificates are checked, and a connection that is well is used again."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from kernel_steer.admission import Node, Upstream
from kernel_steer.upstream.address import AddressRefused, allowed

# Name, TCP and TLS together: the next node is a better hope than a slow one.
CONNECT_TIMEOUT_S = 5.0
# Servers drop idle connections, most after a minute or more.
IDLE_S = 30.0
IDLE_MAX = 32  # of one upstream
_READ_LIMIT = 65536

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


class CannotConnect(OSError):
    """The message says what went wrong; `__cause__` is an AddressRefused, an ssl.SSLError or an OSError."""


@dataclass(eq=False, slots=True)
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    @property
    def usable(self) -> bool:
        """Nothing has come since its last answer, neither its end nor bytes that nobody asked for."""
        quiet = not self.reader.at_eof() and not self.reader._buffer  # type: ignore[attr-defined]
        return quiet and not self.writer.is_closing() and time.monotonic() - self.idle_since < IDLE_S

    def drop(self) -> None:
        """At once, so that the other side stops working."""
        self.writer.transport.abort()


class Connections:
    """Of one gateway. Kept apart by everything that was checked when they were made."""

    def __init__(self, lookup: Lookup | None = None) -> None:
        self._lookup = lookup or _look_up
        self._idle: dict[tuple[str, int, Upstream], list[Connection]] = {}

    def take_idle(self, node: Node) -> Connection | None:
        """One that has answered before; None when a new one is needed."""
        idle = self._idle.get(_key(node), [])
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
            connection.drop()
        return None

    def give(self, node: Node, connection: Connection) -> None:
        """Its answer was read to the end."""
        connection.idle_since = time.monotonic()
        idle = self._idle.setdefault(_key(node), [])
        idle.append(connection)
        while len(idle) > IDLE_MAX or time.monotonic() - idle[0].idle_since >= IDLE_S:
            idle.pop(0).drop()

    async def connect(self, node: Node) -> Connection:
        """Raises CannotConnect."""
        assert node.upstream is not None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                addresses = allowed(
                    await self._lookup(node.host, node.port),
                    private_networks=node.upstream.private_networks,
                )
                sock = await _connect(addresses, node.port)
                try:
                    reader, writer = await asyncio.open_connection(
                        sock=sock, ssl=tls(node.upstream.ca_pem), server_hostname=node.host, limit=_READ_LIMIT
                    )
                except BaseException:
                    sock.close()
                    raise
        except AddressRefused as error:
            raise CannotConnect(f"its address: {error}") from error
        except ssl.SSLCertVerificationError as error:
            raise CannotConnect(f"its certificate is not accepted: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise CannotConnect(f"no TLS connection: {error.reason or error}") from error
        except TimeoutError as error:
            raise CannotConnect(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise CannotConnect(f"no connection: {error.strerror or error}") from error
        return Connection(reader, writer)

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.drop()
        self._idle.clear()


def _key(node: Node) -> tuple[str, int, Upstream]:
    assert node.upstream is not None
    return node.host, node.port, node.upstream


@lru_cache(maxsize=256)
def tls(ca_pem: str) -> ssl.SSLContext:
    """Certificates and host names are checked. Raises ssl.SSLError for an authority that is none."""
    return ssl.create_default_context(cadata=ca_pem or None)


async def _look_up(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def _connect(addresses: Sequence[str], port: int) -> socket.socket:
    """To the first that answers; by number, so that nothing is looked up again."""
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for address in addresses:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, (address, port))
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert failure is not None
    raise failure
