"""What a steered port is, and what became of its connections."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernel_steer.engine.base import NodeKey


class Mode(StrEnum):
    HTTP = "http"  # HTTP/1.1: moves between two requests
    TCP = "tcp"  # any protocol: moves when no byte was under way for `idle_ms`


@dataclass(frozen=True, slots=True)
class Backend:
    """One incarnation of a node, and where it listens."""

    node: NodeKey
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP port on the gateway and the nodes behind it: one serves, one stands by, connected."""

    name: str  # of the port, for people and counters
    port: int  # 0: any that is free
    mode: Mode
    primary: Backend | None
    standby: Backend | None = None
    idle_ms: int = 200
    connections_max: int = 1024

    @property
    def backends(self) -> tuple[Backend, ...]:
        """In order of preference."""
        return tuple(backend for backend in (self.primary, self.standby) if backend is not None)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds."""

    connect_s: float = 3.0  # to a node
    primary_s: float = 0.1  # more for the primary, when the other node is connected already
    stall_s: float = 300.0  # a peer that takes nothing for so long is cut
    linger_s: float = 2.0  # for a client to read the last words
    mend_s: float = 0.25  # between two attempts to replace a lost node; doubled up to 20 times of it


@dataclass(slots=True)
class PortStats:
    """Counts since the gateway's start; `open` is now."""

    open: int = 0
    accepted: int = 0
    refused: int = 0  # over the port's limit
    moved: int = 0  # requests, or idle connections, that went on at another node than the one before
    sent_again: int = 0  # of these: requests whose node was lost under them
    unserved: int = 0  # requests answered 502 or 503 because of a lost node
    cut: int = 0  # connections whose response could not be completed
    to_user_space: int = 0  # times that the kernel handed a connection over
