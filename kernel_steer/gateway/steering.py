"""The signal path inside the gateway: threads of its own turn the first signal to arrive into a flip.

Threads, because the event loop may be busy with a thousand streams at the moment that counts. One reads
datagrams and never waits for anything else; one reads the stream, and may wait for Redis.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import redis

from kernel_steer.admission import Admission, FlipReport, Node
from kernel_steer.engine.base import Engine, NodeKey
from kernel_steer.gateway.moves import Moves
from kernel_steer.signals import (
    DatagramReceiver,
    GatewayAddress,
    Refused,
    Signal,
    SignalReader,
    SignalRefused,
    connect,
    register,
    unregister,
)
from kernel_steer.signals.gateways import REGISTER_EVERY_S

log = logging.getLogger(__name__)

DATAGRAM, STREAM = "datagram", "stream"
_COPIES_REMEMBERED = 64
_SWITCH_INTERVAL_S = 0.0001


@dataclass(frozen=True, slots=True)
class Refusals:
    """How often signals were refused for one reason on one carrier, since the last report."""

    gateway: str
    reason: str  # a value of Refused
    carrier: str
    count: int


# Anybody can send packets, so what is told for the audit trail is told this often per reason and carrier.
REFUSALS_EVERY_S = 60.0
# Called from a thread that may wait.
RefusalsHook = Callable[[Refusals], None]


@dataclass(slots=True)
class SignalStats:
    """Counts since the start of this gateway."""

    heard: Counter[str] = field(default_factory=Counter)  # verified signals, by carrier
    first: Counter[str] = field(default_factory=Counter)  # those that arrived here first, by carrier
    duplicates: int = 0  # the other carrier was faster
    flips: int = 0
    restores: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by reason and carrier


class _Heard:
    """What was said about one incarnation of a node."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.newest: dict[str, Signal] = {}  # by source
        self.copies: deque[tuple[str, datetime, str]] = deque(maxlen=_COPIES_REMEMBERED)
        self.flipped = False

    @property
    def is_leaving(self) -> bool:
        """Several sources may say so (a notice, then SIGTERM): all of them must take it back."""
        return any(not signal.is_cancel for signal in self.newest.values())

    def take(self, signal: Signal, carrier: str) -> bool:
        """Whether this is news; False for a copy. Raises SignalRefused for what is overtaken."""
        copy = (signal.source, signal.signal_at, carrier)
        again = copy in self.copies
        self.copies.append(copy)
        newest = self.newest.get(signal.source)
        if newest is not None and signal.signal_at <= newest.signal_at:
            other_carrier = any((source, at) == copy[:2] and by != carrier for source, at, by in self.copies)
            if signal.signal_at == newest.signal_at or (other_carrier and not again):
                return False
            raise SignalRefused(Refused.REPLAYED, "signal that a newer one has overtaken")
        self.newest[signal.source] = signal
        return True


class Steering:
    """Applies signals once per (node, epoch), and reports what became of each flip."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        loop: asyncio.AbstractEventLoop,
        moves: Moves | None = None,
    ) -> None:
        self.stats = SignalStats()
        self._moves = moves or Moves()
        self._engine = engine
        self._admission = admission
        self._loop = loop
        self._lock = threading.Lock()
        self._heard: dict[str, _Heard] = {}  # by node, the newest incarnation
        self._unreported: Counter[tuple[str, str]] = Counter()
        self._waiting: dict[NodeKey, FlipReport] = {}  # for the next answer's first byte
        self._reports: set[asyncio.Task[None]] = set()

    def apply(self, signal: Signal, carrier: str = STREAM) -> None:
        """Called from the reader threads. New answers go elsewhere (or here again) when this returns."""
        report = None
        with self._lock:
            self.stats.heard[carrier] += 1
            try:
                heard = self._incarnation(signal)
                news = heard.take(signal, carrier)
            except SignalRefused as refusal:
                self._count_refusal(refusal, carrier)
                return
            if not news:
                self.stats.duplicates += 1
                return
            self.stats.first[carrier] += 1
            # Inside the lock: of a notice and its cancellation on two carriers, the newer has the last word.
            if heard.is_leaving and not heard.flipped:
                report = self._flip(signal)
                heard.flipped = True
            elif not heard.is_leaving and heard.flipped:
                self._restore(signal)
                heard.flipped = False
        if report is not None:
            log.info(
                "node %s (epoch %d) flipped away with %d open answers",
                report.node,
                report.epoch,
                report.flows,
            )
            self._loop.call_soon_threadsafe(self._report, report)

    def _incarnation(self, signal: Signal) -> _Heard:
        if not self._admission.knows_node(signal.node):
            raise SignalRefused(Refused.UNKNOWN_NODE, "signal about a node that nobody knows")
        heard = self._heard.get(signal.node)
        if heard is None or heard.epoch < signal.epoch:
            heard = self._heard[signal.node] = _Heard(signal.epoch)
        elif heard.epoch > signal.epoch:
            raise SignalRefused(Refused.REPLAYED, "signal about an incarnation that is past")
        return heard

    def _flip(self, signal: Signal) -> FlipReport:
        key = NodeKey(signal.node, signal.epoch)
        flows = self._engine.flip(key)
        self._admission.node_draining(signal.node, signal.epoch)
        self.stats.flips += 1
        report = FlipReport(signal.node, signal.epoch, signal.signal_at, datetime.now(UTC), flows)
        self._waiting[key] = report
        self._loop.call_soon_threadsafe(self._moves.leaving, key, signal.deadline)
        return report

    def _restore(self, signal: Signal) -> None:
        key = NodeKey(signal.node, signal.epoch)
        self._engine.restore(key)
        self._admission.node_restored(signal.node, signal.epoch)
        self.stats.restores += 1
        self._waiting.pop(key, None)
        self._loop.call_soon_threadsafe(self._moves.staying, key)
        log.info("node %s (epoch %d) stays after all: its notice was cancelled", signal.node, signal.epoch)

    # --- what was not believed -------------------------------------------------------------------------

    def refuse(self, refusal: SignalRefused, carrier: str) -> None:
        """Counts; the log and the audit trail get sums (`take_refusals`), as anybody can send packets."""
        with self._lock:
            self._count_refusal(refusal, carrier)

    def _count_refusal(self, refusal: SignalRefused, carrier: str) -> None:
        self.stats.refused[refusal.reason.value, carrier] += 1
        self._unreported[refusal.reason.value, carrier] += 1

    def take_refusals(self) -> Counter[tuple[str, str]]:
        """Those that were not taken before, by reason and carrier."""
        with self._lock:
            taken, self._unreported = self._unreported, Counter()
        return taken

    # --- reports ---------------------------------------------------------------------------------------

    def first_byte(self, node: Node) -> None:
        """An answer has begun on `node`: it completes the report of every flip away from another one."""
        if not self._waiting:
            return
        with self._lock:
            done = [key for key in self._waiting if key.name != node.name or key.epoch != node.epoch]
            reports = [replace(self._waiting.pop(key), first_byte_at=datetime.now(UTC)) for key in done]
        for report in reports:
            self._report(report)

    def _report(self, report: FlipReport) -> None:
        task = self._loop.create_task(self._send(self._admission.report_flip(report)))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    @staticmethod
    async def _send(report: Coroutine[Any, Any, None]) -> None:
        try:
            await report
        except Exception:
            # The durable part of an eviction is the Celery task's; this only adds the times.
            log.exception("the flip could not be reported")


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
    """Keeps the gateway's address in Redis, and passes on what was refused. May wait for Redis."""

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
                self._try(lambda: register(client, self._address))
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
        self.address = GatewayAddress(gateway, reachable_host, receiver.port)
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
