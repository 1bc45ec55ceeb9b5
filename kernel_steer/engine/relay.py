"""The relay engine: the contract in user space, for any machine.

It pulls: a node's bytes are read only when the ones before are with the client, so a client that
reads slowly slows its node down and costs a bounded amount of memory.
"""

from __future__ import annotations

import socket
from collections import Counter
from threading import Lock

from kernel_steer.engine.base import (
    EngineStats,
    Gate,
    LegEnd,
    LegEnded,
    NodeFlipped,
    NodeKey,
)
from kernel_steer.engine.wake import ClientWatch, wait_readable, wait_writable
from kernel_steer.journal import RING_BYTES, Slot

_READ_BYTES = RING_BYTES // 2
# A client that takes nothing for this long is treated as gone: it blocks a slot of a GPU.
CLIENT_STALL_S = 60.0


class RelayFlow:
    def __init__(
        self,
        engine: RelayEngine,
        *,
        watch: ClientWatch,
        backend: socket.socket,
        node: NodeKey,
        slot: Slot,
        gate: Gate,
        already_read: bytes,
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._client = watch.client
        self._backend: socket.socket | None = backend
        self._node = node
        self._slot = slot
        self._gate = gate
        self._pending = already_read  # read from the node, not yet shown to the gate
        self._held = b""  # journalled, held back by the gate
        self._ended: LegEnd | None = None

    @property
    def delivered(self) -> int:
        return self._slot.delivered

    async def next(self, timeout_s: float) -> None:
        """See Flow.next."""
        while True:
            data, self._pending = self._pending, b""
            if not data:
                data = await self._read(timeout_s)
            if await self._forward(data):
                return

    async def _read(self, timeout_s: float) -> bytes:
        if self._ended is not None or self._backend is None:
            raise LegEnded(self._ended or LegEnd.EOF)
        while True:
            if self._watch.gone:
                self._end(LegEnd.CLIENT_GONE)
            try:
                data = self._backend.recv(_READ_BYTES)
            except BlockingIOError:
                if not await wait_readable(self._backend, timeout_s, self._watch):
                    self._end(LegEnd.CLIENT_GONE if self._watch.gone else LegEnd.STALLED)
                continue
            except OSError as error:
                self._end(LegEnd.RESET, error.strerror or "")
            if not data:
                self._end(LegEnd.EOF)
            return data

    async def _forward(self, data: bytes) -> bool:
        """Journals, then forwards what the gate lets through. True when something got through."""
        allowed = self._gate(data)
        buffer = self._held + data
        start = self._slot.delivered
        ready, self._held = buffer[: allowed - start], buffer[allowed - start :]
        if not ready:
            return False
        # Only what is about to be forwarded goes into the ring: a recovery counts no byte more.
        self._slot.append(ready)
        try:
            await self._send(ready)
        except (OSError, TimeoutError) as error:
            self._end(LegEnd.CLIENT_GONE, str(error))
        return True

    async def _send(self, data: bytes) -> None:
        position, view = self._slot.delivered, memoryview(data)
        while view:
            try:
                sent = self._client.send(view)
            except BlockingIOError:
                await wait_writable(self._client, CLIENT_STALL_S)
                continue
            # After the call: whoever kills this process between the two makes the client a present of one piece.
            # The other order would charge for one that was never sent.
            position, view = position + sent, view[sent:]
            self._slot.mark_delivered(position)
            self._engine.stats.bytes_forwarded += sent

    def _end(self, reason: LegEnd, detail: str = "") -> None:
        self._ended = reason
        raise LegEnded(reason, detail)

    def fence(self) -> int:
        """See Flow.fence. Nothing is forwarded but by `next`, so closing the node's socket is enough."""
        if self._backend is not None:
            self._engine.forget(self._node)
            self._backend.close()
            self._backend = None
        self._pending = self._held = b""
        self._ended = self._ended or LegEnd.EOF
        return self._slot.delivered

    def close(self) -> None:
        self.fence()


class RelayEngine:
    name = "relay"
    pins = ""
    node_map: int | None = None  # descriptor of the kernel's map of flips, where there is one

    def __init__(self) -> None:
        self.stats = EngineStats()
        self._flows: Counter[NodeKey] = Counter()
        self._flipped: set[NodeKey] = set()
        self._lock = Lock()

    def open_flow(
        self,
        *,
        watch: ClientWatch,
        backend: socket.socket,
        node: NodeKey,
        slot: Slot,
        gate: Gate,
        already_read: bytes = b"",
    ) -> RelayFlow:
        """See Engine.open_flow."""
        with self._lock:
            if node in self._flipped:
                backend.close()
                raise NodeFlipped(node.name)
            self._flows[node] += 1
            self.stats.flows_open += 1
            self.stats.flows_total += 1
        return RelayFlow(
            self, watch=watch, backend=backend, node=node, slot=slot, gate=gate, already_read=already_read
        )

    def forget(self, node: NodeKey) -> None:
        with self._lock:
            self._flows[node] -= 1
            self.stats.flows_open -= 1

    def flip(self, node: NodeKey) -> int:
        """See Engine.flip."""
        with self._lock:
            if node not in self._flipped:
                self._flipped.add(node)
                self.stats.flips += 1
            return self._flows[node]

    def restore(self, node: NodeKey) -> None:
        """See Engine.restore."""
        with self._lock:
            self._flipped.discard(node)

    def is_flipped(self, node: NodeKey) -> bool:
        """Nothing new goes to this incarnation. Callable from any thread."""
        with self._lock:
            return node in self._flipped

    def close(self) -> None:
        """Nothing outlives the process."""
