"""Where gateways can be reached by datagram: they say so in Redis, nodes keep the list warm.

Redis: `steer:gateway:ID` is JSON that expires unless it is renewed, `steer:gateways` is the set of ids. With it a
gateway says what it has heard so far (`report`).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import redis

from kernel_steer.signals.datagram import DatagramSender
from kernel_steer.signals.message import Signal
from kernel_steer.signals.own_host import OwnHost
from kernel_steer.signals.report import INDEX, GatewayReport, known_ids, report_key

logger = logging.getLogger(__name__)

ENTRY_TTL_S = 15
REGISTER_EVERY_S = 3.0
REFRESH_S = 2.0
# A gateway whose entry is gone may be alive all the same: Redis may have lost everything. A packet that
# nobody receives costs nothing.
FORGET_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """`host` and `port` take UDP; on the gateway's own host its id leads to a unix socket.

    `pins` names the folder of its engine's maps in the kernel of its host, where it has any.
    """

    gateway: str
    host: str
    port: int
    pins: str = ""


def entry_key(gateway: str) -> str:
    return f"steer:gateway:{gateway}"


def register(client: redis.Redis, address: GatewayAddress, report: GatewayReport | None = None) -> None:
    """To be repeated every REGISTER_EVERY_S. Raises redis.RedisError."""
    with client.pipeline(transaction=False) as pipe:
        pipe.set(entry_key(address.gateway), orjson.dumps(asdict(address)), ex=ENTRY_TTL_S)
        pipe.sadd(INDEX, address.gateway)
        if report is not None:
            pipe.set(report_key(address.gateway), report.to_json(), ex=ENTRY_TTL_S)
        pipe.execute()


def unregister(client: redis.Redis, gateway: str) -> None:
    """Raises redis.RedisError."""
    with client.pipeline(transaction=False) as pipe:
        pipe.delete(entry_key(gateway), report_key(gateway))
        pipe.srem(INDEX, gateway)
        pipe.execute()


def known_gateways(client: redis.Redis) -> list[GatewayAddress]:
    """Who is registered now, in order of id; takes ids without an entry off the index. Raises redis.RedisError."""
    ids = known_ids(client)
    if not ids:
        return []
    entries: Any = client.mget([entry_key(gateway) for gateway in ids])
    expired = [gateway for gateway, entry in zip(ids, entries, strict=True) if entry is None]
    if expired:
        client.srem(INDEX, *expired)
    addresses = (_parse(entry) for entry in entries if entry is not None)
    return [address for address in addresses if address is not None]


def _parse(entry: bytes | str) -> GatewayAddress | None:
    try:
        fields = orjson.loads(entry)
        address = GatewayAddress(
            str(fields["gateway"]), str(fields["host"]), int(fields["port"]), str(fields.get("pins", ""))
        )
        if not 0 < address.port < 65_536:
            raise ValueError("no port")
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("an entry of a gateway is not readable (%s)", type(error).__name__)
        return None
    return address


class GatewayBook(threading.Thread):
    """A node's list of gateways, with a socket to each, renewed in the background until `stop` is set.

    While Redis is away the last list stays. `own_host` is kept up to date with it.
    """

    def __init__(self, client: redis.Redis, stop: threading.Event) -> None:
        super().__init__(name="steer-gateways", daemon=True)
        self.own_host = OwnHost()
        self._client = client
        self._stop_event = stop
        self._lock = threading.Lock()
        self._senders: dict[GatewayAddress, DatagramSender] = {}
        self._seen_at: dict[GatewayAddress, float] = {}
        self._reachable = True

    @property
    def gateways(self) -> list[GatewayAddress]:
        with self._lock:
            return list(self._senders)

    def run(self) -> None:
        while not self._stop_event.is_set():
            self.refresh()
            self._stop_event.wait(REFRESH_S)
        with self._lock:
            for sender in self._senders.values():
                sender.close()
            self._senders.clear()
        self.own_host.close()
        self._client.close()

    def refresh(self) -> None:
        """Reads the list once. Raises nothing."""
        try:
            listed = known_gateways(self._client)
        except (redis.RedisError, OSError) as error:
            if self._reachable:
                logger.warning("list of gateways not renewed (%s), the last one stays", type(error).__name__)
            self._reachable = False
            return
        self._reachable = True
        moment = time.monotonic()
        for address in listed:
            self._seen_at[address] = moment
        for address in listed:
            self._open(address)
        self._forget_before(moment - FORGET_AFTER_S)
        self.own_host.refresh({address.pins for address in self._seen_at if address.pins})

    def _open(self, address: GatewayAddress) -> None:
        with self._lock:
            if (sender := self._senders.get(address)) is not None:
                sender.warm()
                return
        try:
            # Outside the lock: a name is looked up here, which may take its time.
            sender = DatagramSender(address.gateway, address.host, address.port)
        except OSError as error:
            logger.warning(
                "gateway %s cannot be reached by datagram (%s)", address.gateway, type(error).__name__
            )
            return
        with self._lock:
            self._senders[address] = sender

    def _forget_before(self, moment: float) -> None:
        for address in [address for address, seen_at in self._seen_at.items() if seen_at < moment]:
            del self._seen_at[address]
            with self._lock:
                sender = self._senders.pop(address, None)
                if sender is not None:
                    sender.close()

    def send(self, signal: Signal, key: bytes) -> int:
        """One packet to each gateway, at once; returns how many the system took. Raises nothing."""
        packet = signal.to_datagram(key)
        with self._lock:
            return sum(sender.send(packet) for sender in self._senders.values())
