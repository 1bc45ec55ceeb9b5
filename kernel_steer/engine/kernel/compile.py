"""Turns the C sources beside it into bytecode that can be loaded any number of times, without a compiler.

BCC compiles it in a process of its own: LLVM's 100 MB and its chatter on stderr stay there. What it
makes is kept in a cache folder, so the compiler runs once per version of the source. The program uses
stable kernel interfaces only; bytecode does not depend on the running kernel.

BCC is Debian's python3-bpfcc (PyPI's `bcc` is an unrelated package). It needs no kernel headers: it is
given a small tree of stand-ins, because the program includes nothing but the stable ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_steer.engine.kernel.layout import DEFINES

_SOURCE = Path(__file__).with_name("steer.bpf.c")
_PORTS = Path(__file__).with_name("ports.bpf.c")
_DIST_PACKAGES = "/usr/lib/python3/dist-packages"
_FORMAT = 1  # of the cached file
_COMPILE_TIMEOUT_S = 120.0
_PSEUDO_MAP_FD = 1
_LD_IMM64 = 0x18
# Sizes at compile time do not matter: every engine makes its own maps, as large as it needs them.
_SMALL = {"FLOWS": 1, "CLIENTS": 1, "NODES": 1, "ENDS": 1, "LINKS": 1, "PORTS": 1}


class CannotCompile(RuntimeError):
    """There is no bytecode and none can be made; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class MapSpec:
    name: str
    kind: int  # enum bpf_map_type
    key_bytes: int
    value_bytes: int
    max_entries: int
    flags: int


@dataclass(frozen=True, slots=True)
class Relocation:
    """Instruction `at` loads the address of map `name`."""

    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Bytecode:
    """Programs with open places where the maps' descriptors go."""

    maps: tuple[MapSpec, ...]
    programs: dict[str, tuple[bytes, tuple[Relocation, ...]]]


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/apex or ~/.cache/apex."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apex"


@dataclass(frozen=True, slots=True)
class Unit:
    """One C file: the programs in it, and what it is told by name."""

    source: Path
    programs: tuple[str, ...]
    defines: dict[str, int]


def get_bytecode(folder: Path | None = None) -> Bytecode:
    """Of `steer.bpf.c`: from the cache, or compiled now (a few seconds). Raises CannotCompile."""
    return _get(Unit(_SOURCE, ("steer",), DEFINES), folder)


def get_ports_bytecode(defines: dict[str, int], folder: Path | None = None) -> Bytecode:
    """Of `ports.bpf.c`, in the same way."""
    return _get(Unit(_PORTS, ("steer_port", "watch_port"), defines), folder)


def _get(unit: Unit, folder: Path | None) -> Bytecode:
    folder = folder or cache_dir()
    digest = hashlib.sha256(
        unit.source.read_bytes() + json.dumps([_FORMAT, unit.defines, os.uname().machine]).encode()
    ).hexdigest()[:16]
    path = folder / f"{unit.source.name.split('.')[0]}-{digest}.json"
    if not _is_ours(path):
        _compile_into(path, unit)
    try:
        return _decode(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotCompile(f"the cached bytecode {path} cannot be read: {error}") from error


def _is_ours(path: Path) -> bool:
    """A file that somebody else could have written is not loaded into the kernel."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _compile_into(path: Path, unit: Unit) -> None:
    if not (Path(_DIST_PACKAGES) / "bcc" / "libbcc.py").exists():
        raise CannotCompile("BCC is missing: apt-get install python3-bpfcc")
    if not Path("/usr/include/linux/types.h").exists():
        raise CannotCompile("the kernel's stable headers are missing: apt-get install linux-libc-dev")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    __spec__.name,
                    str(unit.source),
                    work,
                    json.dumps([unit.programs, unit.defines]),
                ],
                cwd=Path(__file__).parents[3],
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise CannotCompile(f"BCC cannot compile {unit.source.name}: {_last_words(done.stderr)}")
            os.replace(Path(work) / "out.json", path)  # whole or not at all, also with two of us at once
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"BCC cannot compile {unit.source.name}: {error}") from error


def _last_words(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip() and "modprobe" not in line]
    errors = [line for line in lines if "error:" in line]
    return (errors[:1] or lines[-1:] or ["no reason given"])[0][-300:]


def _decode(raw: dict[str, Any]) -> Bytecode:
    programs = {
        name: (bytes.fromhex(code), tuple(Relocation(*place) for place in places))
        for name, (code, places) in raw["programs"].items()
    }
    return Bytecode(tuple(MapSpec(**spec) for spec in raw["maps"]), programs)


# --- in the compiler's process ------------------------------------------------------------------------


def write_headers(folder: Path) -> None:
    """The tree that BCC takes for kernel sources. Everything of substance is linux-libc-dev's or BCC's own."""
    include = folder / "include"
    files = {
        "linux/kconfig.h": "\n".join(
            [
                "#pragma once",
                "#define CONFIG_BPF_SYSCALL 1",
                *(f"typedef unsigned {kind} u{bits};" for bits, kind in _INTEGERS),
                *(f"typedef signed {kind} s{bits};" for bits, kind in _INTEGERS),
                "typedef __SIZE_TYPE__ size_t;",
                "typedef __UINTPTR_TYPE__ uintptr_t;",
                "typedef _Bool bool;",
                "#define NULL ((void *)0)",
                "#define PAGE_SIZE 4096",
                "",
            ]
        ),
        "linux/log2.h": "#pragma once\n",
        "asm/page.h": "#pragma once\n",
        "linux/bpf.h": "#pragma once\n",
        "uapi/linux/bpf.h": "#pragma once\n",
        "linux/version.h": "#pragma once\n#define LINUX_VERSION_CODE 331520\n"
        "#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))\n",
    }
    for name, text in files.items():
        path = include / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    stable = Path("/usr/include")
    machine = stable / f"{os.uname().machine}-linux-gnu"
    for source, target in (
        (stable / "linux", "linux"),
        (stable / "linux", "uapi/linux"),
        (machine / "asm" if machine.exists() else stable / "asm", "asm"),
        (stable / "asm-generic", "asm-generic"),
    ):
        for header in source.rglob("*.h"):
            path = include / target / header.relative_to(source)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(header)


_INTEGERS = ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))


def _compile(unit: Unit, work: Path) -> dict[str, Any]:
    write_headers(work / "kernel")
    os.environ["BCC_KERNEL_SOURCE"] = str(work / "kernel")
    sys.path.append(_DIST_PACKAGES)  # at the end: nothing else of the distribution may win
    from bcc import BPF, lib  # type: ignore[import-not-found]

    flags = [f"-D{name}={value}" for name, value in (unit.defines | _SMALL).items()]
    module = BPF(text=unit.source.read_bytes(), cflags=flags)
    _declare_functions(lib)
    maps, names = [], {}
    for number in range(lib.bpf_num_tables(module.module)):
        name = lib.bpf_table_name(module.module, number).decode()
        names[lib.bpf_table_fd(module.module, name.encode())] = name
        maps.append(
            {
                "name": name,
                "kind": lib.bpf_table_type_id(module.module, number),
                "key_bytes": lib.bpf_table_key_size_id(module.module, number),
                "value_bytes": lib.bpf_table_leaf_size_id(module.module, number),
                "max_entries": lib.bpf_table_max_entries_id(module.module, number),
                "flags": lib.bpf_table_flags_id(module.module, number),
            }
        )
    programs = {}
    for program in unit.programs:
        name = program.encode()
        code = bytearray(
            ctypes.string_at(
                lib.bpf_function_start(module.module, name), lib.bpf_function_size(module.module, name)
            )
        )
        programs[program] = (_relocate(code, names), code.hex())
    return {
        "maps": maps,
        "programs": {name: (code, places) for name, (places, code) in programs.items()},
    }


def _declare_functions(lib: Any) -> None:
    """The ones that BCC's Python side does not use, and so does not declare."""
    lib.bpf_num_tables.restype, lib.bpf_num_tables.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    lib.bpf_table_name.restype = ctypes.c_char_p
    for name in ("bpf_table_key_size_id", "bpf_table_leaf_size_id"):
        getattr(lib, name).restype = ctypes.c_size_t
    for name in ("bpf_table_name", "bpf_table_key_size_id", "bpf_table_leaf_size_id"):
        getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _relocate(code: bytearray, names: dict[int, str]) -> list[tuple[int, str]]:
    """Finds where maps are named by this process's descriptors, and empties those places."""
    places = []
    for at in range(0, len(code), 8):
        operation, registers, _, immediate = struct.unpack_from("<BBhi", code, at)
        if operation == _LD_IMM64 and registers >> 4 == _PSEUDO_MAP_FD:
            places.append((at // 8, names[immediate]))
            struct.pack_into("<i", code, at + 4, 0)
    return places


if __name__ == "__main__":
    _programs, _defines = json.loads(sys.argv[3])
    _unit, _work = Unit(Path(sys.argv[1]), _programs, _defines), Path(sys.argv[2])
    (_work / "out.json").write_text(json.dumps(_compile(_unit, _work)))
