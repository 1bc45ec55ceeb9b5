"""`ports.bpf.c` in the kernel: loaded once per gateway, beside the program of the API door."""

from __future__ import annotations

import logging
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kernel_steer.engine.kernel import bpf
from kernel_steer.engine.kernel.compile import MapSpec, get_ports_bytecode
from kernel_steer.engine.kernel.program import map_array
from kernel_steer.ports.layout import DEFINES, HEAD_MAX, LINK_BYTES

log = logging.getLogger(__name__)
_ENDS_PER_LINK = 4  # a client, two nodes, and one that is just being replaced
_PORTS_MAX = 4096
_EVENT_BYTES = 16
_COOKIE_BYTES = 8
_SIZES = {"port_links": LINK_BYTES, "port_replays": HEAD_MAX}


class PortsProgram:
    """Raises OSError (Refused from the verifier) or CannotCompile when the kernel does not take it."""

    def __init__(self, node_map: int, *, links_max: int) -> None:
        """`node_map` is the engine's map of flips; it stays the engine's."""
        self.links_max = links_max
        self.maps: dict[str, int] = {}
        self.events_bytes = 0
        self._descriptors: list[int] = []
        self._memory: list[mmap.mmap] = []
        bytecode = get_ports_bytecode(DEFINES)
        try:
            for spec in bytecode.maps:
                self._create(spec, node_map)
            programs = {name: self._link(*code) for name, code in bytecode.programs.items()}
            verdict = bpf.load_verdict(programs["steer_port"], name="steer_port")
            self._descriptors.append(verdict)
            bpf.attach_verdict(verdict, self.maps["port_socks"])
            self.unwatched = self._watch(programs["watch_port"])
            self.links = self._map("port_links", links_max * LINK_BYTES)
            self.replays = self._map("port_replays", links_max * HEAD_MAX)
        except BaseException:
            self.close()
            raise

    def _create(self, spec: MapSpec, node_map: int) -> None:
        if spec.name == "node":
            self.maps["node"] = node_map
            return
        if spec.name in _SIZES and spec.value_bytes != _SIZES[spec.name]:
            raise AssertionError(f"{spec.name}: {spec.value_bytes} bytes in C, {_SIZES[spec.name]} in Python")
        entries, value_bytes, flags = spec.max_entries, spec.value_bytes, spec.flags
        match spec.name:
            case "port_links" | "port_replays":
                entries = self.links_max
            case "port_ends":
                entries, flags = self.links_max * _ENDS_PER_LINK, flags | 1  # BPF_F_NO_PREALLOC
            case "port_socks":
                # An 8-byte value: user space can read a socket's cookie back.
                entries, value_bytes = self.links_max * _ENDS_PER_LINK, _COOKIE_BYTES
            case "port_numbers":
                entries = _PORTS_MAX
            case "port_events":
                wanted = max(2 * self.links_max * _EVENT_BYTES, mmap.PAGESIZE)
                entries = self.events_bytes = 1 << (wanted - 1).bit_length()
        spec = replace(spec, max_entries=entries, value_bytes=value_bytes, flags=flags)
        self.maps[spec.name] = bpf.create_map(
            spec.kind,
            key_bytes=spec.key_bytes,
            value_bytes=spec.value_bytes,
            max_entries=spec.max_entries,
            flags=spec.flags,
            name=spec.name,
        )
        self._descriptors.append(self.maps[spec.name])

    def _link(self, code: bytes, places: tuple) -> bytes:
        linked = bytearray(code)
        for place in places:
            struct.pack_into("<i", linked, place.at * 8 + 4, self.maps[place.name])
        return bytes(linked)

    def _watch(self, code: bytes) -> str:
        """Attaches to this process's cgroup. Returns why that is not possible, or nothing."""
        try:
            program = bpf.load_sock_ops(code, name="watch_port")
            self._descriptors.append(program)
            cgroup = os.open(own_cgroup(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._descriptors.append(bpf.attach_sock_ops(program, cgroup))
            finally:
                os.close(cgroup)
        except OSError as error:
            return f"the kernel does not tell when a node dies: {error.strerror or error}"
        return ""

    def _map(self, name: str, size: int) -> mmap.mmap:
        self._memory.append(map_array(self.maps[name], size))
        return self._memory[-1]

    def watch_port(self, number: int) -> None:
        """Of clients that come to this TCP port from now on, it is known what they have confirmed."""
        bpf.update(self.maps["port_numbers"], struct.pack("=I", number), struct.pack("=I", 1))

    def unwatch_port(self, number: int) -> None:
        bpf.delete(self.maps["port_numbers"], struct.pack("=I", number))

    def close(self) -> None:
        """Once no view of the memory is left. Sockets that are still in the map keep the verdict alive."""
        for memory in self._memory:
            memory.close()
        for fd in self._descriptors:
            with suppress(OSError):
                os.close(fd)
        self._descriptors.clear()
        self._memory.clear()


def own_cgroup() -> Path:
    """This process's folder in the cgroup2 hierarchy, also where that stands beside cgroup1's. Raises OSError."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            for mount in Path("/proc/self/mountinfo").read_text().splitlines():
                before, _, after = mount.partition(" - ")
                if after.split(" ", 1)[0] == "cgroup2":
                    root, at = before.split(" ")[3:5]
                    # Where a part of the hierarchy is mounted (a container's), paths begin there.
                    relative = path[len(root) :] if root != "/" and path.startswith(root) else path
                    return Path(at) / relative.lstrip("/")
    raise OSError("no cgroup2 hierarchy is mounted")
