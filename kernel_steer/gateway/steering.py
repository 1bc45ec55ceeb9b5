"""The signal path inside the gateway: a thread of its own turns a signal into a flip.

A thread, because the event loop may be busy with a thousand streams at the moment that counts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kernel_steer.admission import Admission, FlipReport, Node
from kernel_steer.engine.base import Engine, NodeKey
from kernel_steer.signals import Signal, SignalReader, connect

log = logging.getLogger(__name__)


class Steering:
    """Applies signals once per (node, epoch), and reports what became of each flip."""

    def __init__(self, engine: Engine, admission: Admission, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._admission = admission
        self._loop = loop
        self._lock = threading.Lock()
        self._flipped: set[NodeKey] = set()
        self._waiting: dict[NodeKey, FlipReport] = {}  # for the next answer's first byte
        self._reports: set[asyncio.Task[None]] = set()

    def apply(self, signal: Signal) -> None:
        """Called from the signal thread. New answers go elsewhere when this returns."""
        key = NodeKey(signal.node, signal.epoch)
        with self._lock:
            if key in self._flipped:
                return
            self._flipped.add(key)
        flows = self._engine.flip(key)
        self._admission.node_draining(signal.node, signal.epoch)
        report = FlipReport(signal.node, signal.epoch, signal.signal_at, datetime.now(UTC), flows)
        with self._lock:
            self._waiting[key] = report
        log.info("node %s (epoch %d) flipped away with %d open answers", signal.node, signal.epoch, flows)
        self._loop.call_soon_threadsafe(self._report, report)

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
        super().__init__(name="steer-signals", daemon=True)
        self._redis_url = redis_url
        self._key = key
        self._steering = steering
        self._stop_event = threading.Event()

    def run(self) -> None:
        client = connect(self._redis_url)
        try:
            for signal in SignalReader(client, self._key).read(self._stop_event):
                self._steering.apply(signal)
        finally:
            client.close()

    def stop(self) -> None:
        self._stop_event.set()
