"""A third party's API on loopback: TLS with certificates made here, a key, a base path, and ways to fail."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

KEY = "sk-third-party-0123456789"
WORDS = ("The ", "sea ", "is ", "salt.")


class Authority:
    """Signs certificates; `pem` is what a client has to trust."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Authority of the tests")])
        now = datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def context(self, folder: Path, *, host: str = "127.0.0.1", expired: bool = False) -> ssl.SSLContext:
        """Of a server that calls itself `host`."""
        key = ec.generate_private_key(ec.SECP256R1())
        ends = datetime.now(UTC) + timedelta(days=-1 if expired else 1)
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(ends - timedelta(days=1, hours=1))
            .not_valid_after(ends)
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        path = folder / "server.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class HttpsDouble:
    """`cut_after` words it closes the connection; with a `status` it answers that and no stream."""

    context: ssl.SSLContext
    words: Sequence[str] = WORDS
    cut_after: int | None = None
    silent_after: int | None = None
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[HttpsDouble]:
        writers: set[asyncio.StreamWriter] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            self.connections += 1
            try:
                while await self._answer(reader, writer):
                    pass
            except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass  # the last: the test is over
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=self.context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in writers:
                writer.transport.abort()

    @contextmanager
    def in_a_thread(self) -> Iterator[HttpsDouble]:
        """For tests that have no event loop."""
        loop = asyncio.new_event_loop()
        ready, stop = threading.Event(), asyncio.Event()

        async def run() -> None:
            async with self.running():
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
        thread.start()
        try:
            assert ready.wait(30)
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(30)
            loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.asked.append(Asked(head[0].split(" ")[1], headers, body))
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        if self.status != 200:
            document = json.dumps({"error": self.error}).encode()
            writer.write(
                f"HTTP/1.1 {self.status} X\r\n{more}Content-Length: {len(document)}\r\n\r\n".encode()
                + document
            )
            await writer.drain()
            return True
        writer.write(f"HTTP/1.1 200 OK\r\n{more}Transfer-Encoding: chunked\r\n\r\n".encode())
        for index, word in enumerate(self.words):
            if index == self.cut_after:
                await writer.drain()
                writer.close()
                await writer.wait_closed()
                return False
            if index == self.silent_after:
                await writer.drain()
                await reader.read(1)
                self.hung_up.set()
                return False
            delta = {"content": word} | ({"role": "assistant"} if index == 0 else {})
            self._say(writer, body["model"], [{"index": 0, "delta": delta, "finish_reason": None}])
        self._say(writer, body["model"], [{"index": 0, "delta": {}, "finish_reason": "stop"}])
        usage = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11, "cost": 0.0001}
        self._say(writer, body["model"], [], usage=usage)
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        return True

    @staticmethod
    def _say(writer: asyncio.StreamWriter, model: str, choices: list[Any], **more: Any) -> None:
        event = {"id": "gen-1", "object": "chat.completion.chunk", "created": 1, "model": model}
        event |= {"provider": "a supplier of theirs", "choices": choices} | more
        writer.write(_chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)
