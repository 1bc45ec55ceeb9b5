"""The bpf(2) calls that the engine needs, by system call: no library, no compiler.

Every function raises OSError with the kernel's reason. Descriptors are plain ints; their owner closes them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import threading
from contextlib import suppress
from enum import IntEnum

_SYSCALL = {"x86_64": 321, "aarch64": 280}.get(os.uname().machine)
_libc = ctypes.CDLL(None, use_errno=True)
# Calls that keep the interpreter's lock: for those that take less time than getting it back would.
_libc_locked = ctypes.PyDLL(None)
_LOG_BYTES = 1 << 20
_LOAD_TRIES = 10


class MapKind(IntEnum):
    """enum bpf_map_type"""

    HASH = 1
    ARRAY = 2
    PERCPU_ARRAY = 6
    SOCKHASH = 18
    RINGBUF = 27


class Update(IntEnum):
    ANY = 0
    NOEXIST = 1


_PROG_TYPE_SOCK_OPS, _PROG_TYPE_SK_SKB = 13, 14
_ATTACH_SOCK_OPS, _ATTACH_SK_SKB_VERDICT = 3, 38
_MAP_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _PROG_LOAD, _OBJ_PIN, _OBJ_GET, _ATTACH = range(9)
_INFO_BY_FD, _LINK_CREATE = 15, 28


class Refused(OSError):
    """The verifier refused a program; `log` is its reasoning."""

    log = ""


def supported() -> bool:
    """This machine's system call number is known here."""
    return _SYSCALL is not None


def _call(command: int, attributes: bytes) -> int:
    if _SYSCALL is None:
        raise OSError(errno.ENOSYS, f"bpf(2) is not known on {os.uname().machine}")
    buffer = ctypes.create_string_buffer(attributes, 128)
    result: int = _libc.syscall(_SYSCALL, command, buffer, max(len(attributes), 8))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _address(buffer: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(buffer)


def create_map(
    kind: int, *, key_bytes: int, value_bytes: int, max_entries: int, flags: int = 0, name: str = ""
) -> int:
    # map_type .. map_flags, inner_map_fd, numa_node, map_name
    return _call(
        _MAP_CREATE,
        struct.pack(
            "=IIIIIII16s", kind, key_bytes, value_bytes, max_entries, flags, 0, 0, name.encode()[:15]
        ),
    )


def lookup(fd: int, key: bytes, value_bytes: int) -> bytes | None:
    key_buffer = ctypes.create_string_buffer(key, len(key))
    value = ctypes.create_string_buffer(value_bytes)
    try:
        _call(_LOOKUP, struct.pack("=IIQQQ", fd, 0, _address(key_buffer), _address(value), 0))
    except FileNotFoundError:
        return None
    return value.raw


def update(fd: int, key: bytes, value: bytes, flags: Update = Update.ANY) -> None:
    key_buffer = ctypes.create_string_buffer(key, len(key))
    value_buffer = ctypes.create_string_buffer(value, len(value))
    _call(_UPDATE, struct.pack("=IIQQQ", fd, 0, _address(key_buffer), _address(value_buffer), flags))


class _Words(threading.local):
    """One key and one value of 8 bytes, and the arguments of the calls about them: made once in each thread.

    Right after a thread woke up its time goes into code that is not in the processor's caches, so there is as little
    as can be: nothing is converted, and why a call failed is asked by making it again the long way.
    """

    def __init__(self) -> None:
        memory = ctypes.create_string_buffer(48)
        address = ctypes.addressof(memory)
        # map_fd and padding, key, value, flags; then the key and the value
        struct.pack_into("=QQQ", memory, 8, address + 32, address + 40, 0)
        self.fd = memoryview(memory).cast("B")[:8].cast("Q")
        self.pair = memoryview(memory).cast("B")[32:].cast("Q")
        number, place, size = ctypes.c_long(_SYSCALL or -1), ctypes.c_void_p(address), ctypes.c_uint(32)
        self.lookup = number, ctypes.c_int(_LOOKUP), place, size
        self.update = number, ctypes.c_int(_UPDATE), place, size


_words = _Words()
_syscall = _libc_locked.syscall


def lookup_word(fd: int, key: int) -> int | None:
    """`lookup` for a map of 8-byte keys and values, for where microseconds count."""
    words = _words
    words.fd[0], words.pair[0] = fd, key
    if _syscall(*words.lookup) == 0:
        return words.pair[1]
    found = lookup(fd, key.to_bytes(8, sys.byteorder), 8)
    return int.from_bytes(found, sys.byteorder) if found else None


def update_word(fd: int, key: int, value: int) -> None:
    """`update` for a map of 8-byte keys and values, for where microseconds count."""
    words = _words
    words.fd[0], words.pair[0], words.pair[1] = fd, key, value
    if _syscall(*words.update) != 0:
        update(fd, key.to_bytes(8, sys.byteorder), value.to_bytes(8, sys.byteorder))


def delete(fd: int, key: bytes) -> bool:
    """Whether there was such a key."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    try:
        _call(_DELETE, struct.pack("=IIQQQ", fd, 0, _address(key_buffer), 0, 0))
    except FileNotFoundError:
        return False
    return True


def max_entries(fd: int) -> int:
    """Of a map."""
    info = ctypes.create_string_buffer(80)  # struct bpf_map_info; max_entries is its fifth member
    _call(_INFO_BY_FD, struct.pack("=IIQ", fd, len(info), _address(info)))
    return int(struct.unpack_from("=5I", info)[4])


def load_verdict(code: bytes, *, name: str) -> int:
    """Raises Refused when the verifier says no."""
    return _load(code, name, _PROG_TYPE_SK_SKB, _ATTACH_SK_SKB_VERDICT)


def load_sock_ops(code: bytes, *, name: str) -> int:
    """Raises Refused when the verifier says no."""
    return _load(code, name, _PROG_TYPE_SOCK_OPS, _ATTACH_SOCK_OPS)


def _load(code: bytes, name: str, kind: int, attach_to: int) -> int:
    instructions = ctypes.create_string_buffer(code, len(code))
    license_name = ctypes.create_string_buffer(b"GPL")

    def attributes(log: ctypes.Array[ctypes.c_char] | None) -> bytes:
        # prog_type, insn_cnt, insns, license, log_level, log_size, log_buf, kern_version, prog_flags,
        # prog_name, prog_ifindex, expected_attach_type
        return struct.pack(
            "=IIQQIIQII16sII",
            kind,
            len(code) // 8,
            _address(instructions),
            _address(license_name),
            1 if log else 0,
            _LOG_BYTES if log else 0,
            _address(log) if log else 0,
            0,
            0,
            name.encode()[:15],
            0,
            attach_to,
        )

    for _ in range(_LOAD_TRIES):
        try:
            return _call(_PROG_LOAD, attributes(None))
        except (BlockingIOError, InterruptedError):
            continue  # a signal arrived while the verifier was at work, and it gives up then
        except OSError as error:
            log = ctypes.create_string_buffer(_LOG_BYTES)
            with suppress(OSError):  # once more, only to hear why
                os.close(_call(_PROG_LOAD, attributes(log)))
            refused = Refused(error.errno, f"the verifier refuses the program: {error.strerror}")
            refused.log = log.value.decode(errors="replace")
            raise refused from error
    raise OSError(errno.EAGAIN, "the verifier is interrupted by signals all the time")


def attach_verdict(program: int, socket_map: int) -> None:
    """Sockets that are put into the map from now on are under the program's verdict."""
    _call(_ATTACH, struct.pack("=IIIII", socket_map, program, _ATTACH_SK_SKB_VERDICT, 0, 0))


def attach_sock_ops(program: int, cgroup: int) -> int:
    """The program hears of the TCP sockets of this cgroup's processes until the descriptor that is returned,
    and so also the process, is closed. Others' programs stay."""
    return _call(_LINK_CREATE, struct.pack("=IIII", program, cgroup, _ATTACH_SOCK_OPS, 0))


def pin(fd: int, path: str) -> None:
    name = ctypes.create_string_buffer(os.fsencode(path))
    _call(_OBJ_PIN, struct.pack("=QII", _address(name), fd, 0))


def open_pin(path: str) -> int:
    name = ctypes.create_string_buffer(os.fsencode(path))
    return _call(_OBJ_GET, struct.pack("=QII", _address(name), 0, 0))
