"""The kernel engine: plain token events go from node to client without waking the gateway.

It is a relay that lets the kernel do what needs no decision. Whatever cannot or must not be spliced (a
Unix socket, a half-closed node, a slow client, no free slot) goes the relay's way, per flow or per segment.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from typing import Any

from kernel_steer.engine.base import Gate, NodeFlipped, NodeKey
from kernel_steer.engine.kernel import pins, recovery, tcp
from kernel_steer.engine.kernel.compile import Bytecode, get_bytecode
from kernel_steer.engine.kernel.events import Events
from kernel_steer.engine.kernel.flow import KernelFlow
from kernel_steer.engine.kernel.lane import Lane, LaneUnavailable
from kernel_steer.engine.kernel.program import PINNED, Program
from kernel_steer.engine.relay import RelayEngine, RelayFlow
from kernel_steer.engine.wake import ClientWatch
from kernel_steer.journal import RING_BYTES, Slot

log = logging.getLogger(__name__)


class KernelEngine(RelayEngine):
    """See Engine. Making one takes a tenth of a second; the first one ever compiles the program."""

    name = "kernel"

    def __init__(self, flows_max: int = 1024, bytecode: Bytecode | None = None) -> None:
        """Raises OSError, CannotCompile or PinsUnavailable; `probe` says beforehand what is missing."""
        super().__init__()
        self._program = Program(bytecode or get_bytecode(), flows_max=flows_max)
        try:
            self.owner = pins.Owner()
            for name in PINNED:
                self.owner.pin(name, self._program.maps[name])
            self.pins = self.owner.folder.name
            self.node_map = self._program.maps["node"]
        except BaseException:
            self._program.close()
            raise
        self._lanes: list[Lane] = []
        self._free: list[Lane] = []
        self._events = Events(self._program.maps["events"], self._program.events_bytes)
        self._epoll = select.epoll()
        self._epoll.register(self._events.fd, select.EPOLLIN)
        self._by_index: dict[int, KernelFlow] = {}
        self._by_fd: dict[int, KernelFlow] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._noted: object = None  # the mapped journal whose path has been noted

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
        if pins.first_live_epoch(self._program.maps["node"], node.name) > node.epoch:
            backend.close()
            raise NodeFlipped(node.name)
        asked: dict[str, Any] = {"watch": watch, "backend": backend, "node": node, "slot": slot, "gate": gate}
        drained, obstacle = _drain(backend)
        already_read += drained
        relayed = super().open_flow(**asked, already_read=already_read)
        try:
            if obstacle:
                raise LaneUnavailable(obstacle)
            return self._open_lane(already_read=already_read, **asked)
        except LaneUnavailable as reason:
            log.info("a flow is relayed: %s", reason)
            return relayed

    def _open_lane(self, *, already_read: bytes, **asked: Any) -> KernelFlow:
        lane = self._take_lane()
        client, backend, slot = asked["watch"].client, asked["backend"], asked["slot"]
        try:
            lane.open(client, backend, node=asked["node"], already_read=len(already_read))
        except BaseException:
            self._free.append(lane)
            raise
        base = tcp.progress(client).accepted
        self._note_journal(slot)
        recovery.stamp(slot, owner=self.owner.number, lane=lane.index, generation=lane.generation)
        flow = KernelFlow(self, lane, base=base, already_read=already_read, **asked)
        self._listen()
        # Not for EPOLLIN, which the kernel raises for every segment, also for those it redirects.
        self._epoll.register(backend.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)
        self._by_index[lane.index] = self._by_fd[backend.fileno()] = flow
        return flow

    def _take_lane(self) -> Lane:
        if self._free:
            return self._free.pop()
        if len(self._lanes) == self._program.flows_max:
            raise LaneUnavailable("every slot is in use")
        self._lanes.append(Lane(self._program, len(self._lanes)))
        return self._lanes[-1]

    def _note_journal(self, slot: Slot) -> None:
        if slot._memory is not self._noted:
            self._noted = slot._memory
            self.owner.note_journal(recovery.path_of(slot))

    def close_lane(self, flow: KernelFlow, lane: Lane, backend: socket.socket) -> None:
        """The backend is closed here: only then no verdict can be under way in the lane."""
        del self._by_index[lane.index], self._by_fd[backend.fileno()]
        self._epoll.unregister(backend.fileno())
        lane.forget()
        backend.close()
        lane.reset()
        self._free.append(lane)
        if not self._by_index and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._epoll.fileno())
            self._loop = None

    def _listen(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._epoll.fileno(), self._on_ready)

    def _on_ready(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if fd == self._events.fd:
                for index in self._events.take():
                    if flow := self._by_index.get(index):
                        flow.wake()
            elif flow := self._by_fd.get(fd):
                flow.hang_up()

    def flip(self, node: NodeKey) -> int:
        """See Engine.flip. Other processes do the same with `pins.NodeMaps`."""
        if not pins.write_flip(self._program.maps["node"], node) and node not in self._flipped:
            self.stats.flips_found += 1
        return super().flip(node)

    def restore(self, node: NodeKey) -> None:
        """See Engine.restore."""
        pins.take_flip_back(self._program.maps["node"], node)
        super().restore(node)

    def is_flipped(self, node: NodeKey) -> bool:
        """See RelayEngine.is_flipped. Also of flips that other processes wrote."""
        return pins.first_live_epoch(self._program.maps["node"], node.name) > node.epoch

    def close(self) -> None:
        """See Engine.close."""
        for flow in list(self._by_index.values()):
            flow.close()
        self._epoll.close()
        self._events.close()
        for lane in self._lanes:
            lane.release()
        self._program.close()
        self.owner.close()


def _drain(backend: socket.socket) -> tuple[bytes, str]:
    """Empties the socket: a segment read in part would be forwarded whole once it is in the kernel's map.

    Returns what it held, and why it cannot be spliced (or nothing).
    """
    data = b""
    while len(data) < RING_BYTES:
        try:
            piece = backend.recv(RING_BYTES)
        except BlockingIOError:
            return data, ""
        except OSError as error:
            return data, error.strerror or "the node is lost"
        if not piece:
            return data, "the node has closed already"
        data += piece
    return data, "more was waiting than is spliced"
