"""Chooses TCP ports: the usual one, the one that was asked for, or the next free one."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from apex.env import Env, fail

_SEARCH = 200


class PortTaken(RuntimeError):
    """A port that was asked for by name is in use; the message says by whom."""


class Ports:
    """Hands out each port once. `environ` holds what the user asked for."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._given: set[int] = set()

    def choose(self, variable: str, usual: int, host: str = "127.0.0.1") -> int:
        """The port named by `variable`, else `usual`, else the next free one. Raises PortTaken."""
        env = Env(self._environ)
        wanted = env.integer(variable, usual, low=1, high=65535)
        if env.problems:
            fail(env.problems)
        if self._take(wanted, host):
            return wanted
        if self._environ.get(variable, "").strip():
            raise PortTaken(
                f"{variable}={wanted} is taken by {_holder(wanted)}: end that, or choose another port"
            )
        for port in range(wanted + 1, min(wanted + _SEARCH, 65536)):
            if self._take(port, host):
                return port
        raise PortTaken(f"no free port from {wanted} on: set {variable}")

    def _take(self, port: int, host: str) -> bool:
        if port in self._given or not _is_free(port, host):
            return False
        self._given.add(port)
        return True


def _is_free(port: int, host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a connection in TIME_WAIT does not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _holder(port: int) -> str:
    """Who listens there, as far as we may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return f"another program (ask: ss -ltnp 'sport = :{port}')"
