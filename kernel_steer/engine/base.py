"""The contract of an engine: carry a node's answer to a client, and know exactly what arrived.

Two engines keep it: `relay` in user space, on any machine and for odd traffic, and `kernel` (SOCKHASH
and sk_skb). One conformance suite (tests/kernel_steer/test_engine_conformance.py) runs on both.

A flow carries the *body* of one HTTP answer, verbatim, chunk framing included. The head has been read
and written by the caller; what came with it is handed over as `already_read`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kernel_steer.engine.wake import ClientWatch
from kernel_steer.journal import Slot

# Looks at the bytes that came next and says how many body bytes, counted from the start of the leg,
# may be shown to the client by now. It only ever grows. Raising `BadLeg` ends the leg.
Gate = Callable[[bytes], int]


class BadLeg(Exception):
    """The node's bytes are no valid answer (framing, JSON, an error event). The message says how."""


class LegEnd(StrEnum):
    """Why no further byte comes out of a flow."""

    EOF = "eof"  # the node closed; whether the answer was complete is the reader's to say
    RESET = "reset"  # the node's host or process went away
    STALLED = "stalled"  # nothing came for too long
    BAD = "bad"  # the gate refused what came
    CLIENT_GONE = "client_gone"


class LegEnded(Exception):
    def __init__(self, reason: LegEnd, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


class NodeFlipped(Exception):
    """The node was flipped away between choosing it and opening the flow: choose again."""


@dataclass(frozen=True, slots=True)
class NodeKey:
    """One incarnation of a node."""

    name: str
    epoch: int


@dataclass(slots=True)
class EngineStats:
    flows_open: int = 0
    flows_total: int = 0
    bytes_forwarded: int = 0
    flips: int = 0
    flips_found: int = 0  # of these: another process on this host had written them into the kernel before


class Flow(Protocol):
    """One leg on its way to one client."""

    @property
    def delivered(self) -> int:
        """Body bytes of this leg that the client's TCP has accepted. Exact, also after an end."""
        ...

    async def next(self, timeout_s: float) -> None:
        """Returns when more was journalled and delivered. Raises LegEnded when there is no more."""
        ...

    def fence(self) -> int:
        """From now on no byte of the node reaches the client; returns `delivered`. Idempotent."""
        ...

    def close(self) -> None:
        """Fences, and gives up the node's socket. The client's socket stays the caller's."""
        ...


class Engine(Protocol):
    name: str
    stats: EngineStats
    pins: str  # the folder under /sys/fs/bpf/apex where other processes find its maps; "" when it has none
    node_map: int | None  # descriptor of the kernel's map of flips, where there is one

    def open_flow(
        self,
        *,
        watch: ClientWatch,
        backend: socket.socket,
        node: NodeKey,
        slot: Slot,
        gate: Gate,
        already_read: bytes = b"",
    ) -> Flow:
        """Takes over the backend socket (also when it raises). `watch` holds the client; both are non-blocking.

        Raises NodeFlipped when the node's incarnation has been flipped away.
        """
        ...

    def flip(self, node: NodeKey) -> int:
        """No new flow for this incarnation from now on; returns its open flows. Callable from any thread."""
        ...

    def restore(self, node: NodeKey) -> None:
        """Takes a flip of this incarnation back: new flows may open again. Callable from any thread."""
        ...

    def is_flipped(self, node: NodeKey) -> bool:
        """Nothing new goes to this incarnation. Callable from any thread."""
        ...

    def close(self) -> None: ...
