"""The program in the kernel, with maps of its own: one per engine, so engines do not disturb each other."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import replace

from kernel_steer.engine.kernel import bpf
from kernel_steer.engine.kernel.compile import Bytecode, MapSpec
from kernel_steer.engine.kernel.layout import FLOW_BYTES, RING_STRIDE

_SIZES = {"flows": FLOW_BYTES, "rings": RING_STRIDE}
_COOKIE_BYTES = 8
_NODES_MAX = 65536
# Clients between two answers stay in the map until they close.
_CLIENTS_PER_FLOW = 16
_EVENT_BYTES = 16  # a ring buffer record with its header
PINNED = ("flows", "rings", "node")


class Program:
    """Loaded and attached. Raises OSError (Refused from the verifier) when the kernel does not take it."""

    def __init__(self, bytecode: Bytecode, *, flows_max: int) -> None:
        self.flows_max = flows_max
        self.maps: dict[str, int] = {}
        self.events_bytes = 0
        self._programs: list[int] = []
        self._memory: list[mmap.mmap] = []
        try:
            for spec in bytecode.maps:
                scaled = _scaled(spec, flows_max)
                self.maps[spec.name] = _create(scaled)
                if spec.name == "events":
                    self.events_bytes = scaled.max_entries
            code, places = bytecode.programs["steer"]
            linked = bytearray(code)
            for place in places:
                struct.pack_into("<i", linked, place.at * 8 + 4, self.maps[place.name])
            program = bpf.load_verdict(bytes(linked), name="steer")
            self._programs.append(program)
            bpf.attach_verdict(program, self.maps["nodes"])
            self.flows = self._map("flows", flows_max * FLOW_BYTES)
            self.rings = self._map("rings", flows_max * RING_STRIDE)
        except BaseException:
            self.close()
            raise

    def _map(self, name: str, size: int) -> mmap.mmap:
        self._memory.append(map_array(self.maps[name], size))
        return self._memory[-1]

    def close(self) -> None:
        """Gives up memory and descriptors, once no view of the memory is left.

        A socket that is still under the program's verdict keeps it and its maps alive in the kernel.
        """
        for memory in self._memory:
            memory.close()
        for fd in (*self.maps.values(), *self._programs):
            os.close(fd)
        self.maps.clear()
        self._programs.clear()


def map_array(fd: int, size: int) -> mmap.mmap:
    """A mappable array as memory. Longer than `size`: the kernel maps whole pages."""
    pages = -(-size // mmap.PAGESIZE)
    return mmap.mmap(fd, pages * mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _scaled(spec: MapSpec, flows_max: int) -> MapSpec:
    if spec.name in _SIZES and spec.value_bytes != _SIZES[spec.name]:
        raise AssertionError(f"{spec.name}: {spec.value_bytes} bytes in C, {_SIZES[spec.name]} in Python")
    match spec.name:
        case "flows" | "rings" | "conn":
            return replace(spec, max_entries=flows_max)
        case "nodes":
            # An 8-byte value: user space can read a socket's cookie back.
            return replace(spec, max_entries=flows_max, value_bytes=_COOKIE_BYTES)
        case "clients":
            return replace(spec, max_entries=flows_max * _CLIENTS_PER_FLOW, value_bytes=_COOKIE_BYTES)
        case "node":
            return replace(
                spec, max_entries=_NODES_MAX, flags=spec.flags | 1
            )  # grown as needed: BPF_F_NO_PREALLOC
        case "events":
            wanted = max(2 * flows_max * _EVENT_BYTES, mmap.PAGESIZE)
            return replace(spec, max_entries=1 << (wanted - 1).bit_length())
        case _:
            return spec


def _create(spec: MapSpec) -> int:
    return bpf.create_map(
        spec.kind,
        key_bytes=spec.key_bytes,
        value_bytes=spec.value_bytes,
        max_entries=spec.max_entries,
        flags=spec.flags,
        name=spec.name,
    )
