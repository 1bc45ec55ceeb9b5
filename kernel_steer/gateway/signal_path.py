"""How signals reach `Steering`: by threads of their own, the first to arrive counts.

Threads, because the event loop may be busy with a thousand streams at the moment that counts. One reads
datagrams and never waits for anything else; one reads the stream, and may wait for Redis.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

import redis

from kernel_steer.gateway.steering import DATAGRAM, STREAM, Steering
from kernel_steer.signals import (
    DatagramReceiver,
    GatewayAddress,
    Refusals,
    Signal,
    SignalReader,
    connect,
    register,
    unregister,
)
from kernel_steer.signals.gateways import REGISTER_EVERY_S

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0001
# Anybody can send packets, so what is told for the audit trail is told this often per reason and carrier.
REFUSALS_EVERY_S = 60.0
# Called from a thread that may wait.
RefusalsHook = Callable[[Refusals], None]


class SignalThread(threading.Thread):
    """Reads the stream until `stop()`. A Redis that is away is waited for."""

    def __init__(self, redis_url: str, key: bytes, steering: Steering) -> None:
        super().__init__(name="steer-stream", daemon=True)
        self._redis_url = redis_url
        self._key = key
        self._steering = steering
        self._stop_event = threading.Event()

    def run(self) -> None:
        client = connect(self._redis_url)
        reader = SignalReader(client, self._key, on_refused=lambda why: self._steering.refuse(why, STREAM))
        try:
            for signal in reader.read(self._stop_event):
                _apply(self._steering, signal, STREAM)
        finally:
            client.close()

    def stop(self) -> None:
        self._stop_event.set()


class DatagramThread(threading.Thread):
    """Reads the datagrams of a receiver until `stop()`, and closes it."""

    def __init__(self, receiver: DatagramReceiver, steering: Steering) -> None:
        super().__init__(name="steer-datagrams", daemon=True)
        self._receiver = receiver
        self._steering = steering

    def run(self) -> None:
        try:
            for signal in self._receiver.read(lambda why: self._steering.refuse(why, DATAGRAM)):
                _apply(self._steering, signal, DATAGRAM)
        finally:
            self._receiver.close()

    def stop(self) -> None:
        self._receiver.stop()


def _apply(steering: Steering, signal: Signal, carrier: str) -> None:
    try:
        steering.apply(signal, carrier)
    except Exception:
        # A reader that ends would leave the gateway deaf for every node.
        log.exception("a signal about node %s could not be applied", signal.node)


class RegisterThread(threading.Thread):
    """Keeps the gateway's address and its counts in Redis, and passes on what was refused. May wait for Redis."""

    def __init__(
        self, redis_url: str, address: GatewayAddress, steering: Steering, on_refused: RefusalsHook | None
    ) -> None:
        super().__init__(name="steer-register", daemon=True)
        self._redis_url = redis_url
        self._address = address
        self._steering = steering
        self._on_refused = on_refused
        self._untold: Counter[tuple[str, str]] = Counter()  # by reason and carrier
        self._told_at: dict[tuple[str, str], float] = {}
        self._stop_event = threading.Event()
        self._reachable = True

    def run(self) -> None:
        client = connect(self._redis_url)
        try:
            while not self._stop_event.is_set():
                self._try(lambda: register(client, self._address, self._steering.report()))
                self._pass_on()
                self._stop_event.wait(REGISTER_EVERY_S)
            self._pass_on(all_of_it=True)
            self._try(lambda: unregister(client, self._address.gateway))
        finally:
            client.close()

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (redis.RedisError, OSError) as error:
            if self._reachable:
                log.warning("gateway not registered for datagrams (%s), trying again", type(error).__name__)
            self._reachable = False
        else:
            self._reachable = True

    def _pass_on(self, *, all_of_it: bool = False) -> None:
        refusals = self._steering.take_refusals()
        for (reason, carrier), count in refusals.items():
            log.warning("refused %d signals of the %s: %s", count, carrier, reason)
        self._untold += refusals
        now = time.monotonic()
        for key in list(self._untold):
            if not all_of_it and now < self._told_at.get(key, -math.inf) + REFUSALS_EVERY_S:
                continue
            self._told_at[key] = now
            self._tell(Refusals(self._address.gateway, *key, self._untold.pop(key)))

    def _tell(self, refusals: Refusals) -> None:
        if self._on_refused is None:
            return
        try:
            self._on_refused(refusals)
        except Exception as error:  # noqa: BLE001 - the log has it, and the gateway has other things to do
            log.warning("refused signals not passed on (%s)", type(error).__name__)

    def stop(self) -> None:
        self._stop_event.set()


class SignalPath:
    """Everything that listens for evictions in one gateway process."""

    def __init__(
        self,
        steering: Steering,
        *,
        redis_url: str,
        key: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        on_refused: RefusalsHook | None = None,
    ) -> None:
        """Binds `host`:`port` (0: any) for UDP. Raises OSError when it cannot."""
        gateway = f"{socket.gethostname()}-{secrets.token_hex(8)}"
        receiver = DatagramReceiver(gateway, key, host=host, port=port)
        reachable_host = _own_host(redis_url) if host in {"0.0.0.0", "::"} else receiver.host
        self.address = GatewayAddress(gateway, reachable_host, receiver.port, steering.pins)
        self._threads = (
            DatagramThread(receiver, steering),
            SignalThread(redis_url, key, steering),
            RegisterThread(redis_url, self.address, steering, on_refused),
        )

    def start(self) -> None:
        # A thread that wakes up waits this long for an event loop that computes, several times per signal,
        # and Python's 5 ms add up (docs/signals.md). While the other threads sleep it costs nothing.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Does not wait: it is called from the event loop."""
        for thread in self._threads:
            thread.stop()

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)


def _own_host(redis_url: str) -> str:
    """This machine's address on the way to Redis: nodes reach Redis too, so they most likely reach it."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix" or not parts.hostname:
        return "127.0.0.1"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # UDP: chooses the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:  # no name service or no route yet: the machine's name may be good later
        return socket.gethostname()
