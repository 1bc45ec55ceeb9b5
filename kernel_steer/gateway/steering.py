"""What a gateway does with a signal: believe it or not, flip or flip back, once per (node, epoch)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kernel_steer.admission import Admission, FlipReport, Node
from kernel_steer.engine.base import Engine, NodeKey
from kernel_steer.gateway.moves import Moves
from kernel_steer.signals import GatewayReport, Refused, Signal, SignalRefused

log = logging.getLogger(__name__)

DATAGRAM, STREAM = "datagram", "stream"
_COPIES_REMEMBERED = 64


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

    @property
    def deadline(self) -> datetime | None:
        """The earliest; None when a source named none, which is any moment."""
        deadlines = [signal.deadline for signal in self.newest.values() if not signal.is_cancel]
        named = [deadline for deadline in deadlines if deadline is not None]
        return min(named) if len(named) == len(deadlines) else None

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

    @property
    def pins(self) -> str:
        """Where processes of this host find the engine's maps; see Engine."""
        return self._engine.pins

    def report(self) -> GatewayReport:
        """What this gateway has heard and done up to now."""
        with self._lock:
            stats = self.stats
            return GatewayReport(
                engine=self._engine.name,
                heard=dict(stats.heard),
                first=dict(stats.first),
                duplicates=stats.duplicates,
                flips=stats.flips,
                flips_found=self._engine.stats.flips_found,
                restores=stats.restores,
                refused=[(reason, carrier, count) for (reason, carrier), count in stats.refused.items()],
            )

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
            if heard.is_leaving:
                if not heard.flipped:
                    report = self._flip(signal)
                    heard.flipped = True
                node = NodeKey(signal.node, signal.epoch)
                self._loop.call_soon_threadsafe(self._moves.leaving, node, heard.deadline)
            elif heard.flipped:
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
