"""How long a signal takes: from the listener's process to the flip applied in a gateway's.

Prints one JSON object, milliseconds. Datagram alone (unix socket and UDP), stream alone, both as in the
product, both while the gateway's event loop computes without a pause (with the gateway's switch interval
and with Python's), and a Celery task alone. Real
processes, a real Valkey, the relay engine; the clock is CLOCK_MONOTONIC, which processes share.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from celery import Celery

from apex.local.valkey import EmbeddedValkey
from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.relay import RelayEngine
from kernel_steer.gateway.signal_path import SignalPath
from kernel_steer.gateway.steering import Steering
from kernel_steer.signals import DatagramSender, GatewayAddress, GatewayBook, Signal, connect, publish
from tests.kernel_steer.harness import AdmissionDouble

SIGNALS, GAP_S, ROUNDS = 150, 0.004, 3
KEY = b"k" * 32
TASK = "bench.flip"
PYTHONS_SWITCH_INTERVAL_S = 0.005


class TimedEngine(RelayEngine):
    """Notes when each incarnation was flipped."""

    def __init__(self) -> None:
        super().__init__()
        self.flipped_ns: dict[int, int] = {}

    def flip(self, node: NodeKey) -> int:
        flows = super().flip(node)
        self.flipped_ns[node.epoch] = time.monotonic_ns()
        return flows


def run_gateway(url: str, pipe: Connection) -> None:
    """Answers "times" with what was flipped when. "busy" makes the event loop compute, "busy_python" does
    so with Python's own switch interval, "idle" ends it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = TimedEngine()
        path = SignalPath(Steering(engine, AdmissionDouble([]), loop), redis_url=url, key=KEY)
        path.start()
        ours = sys.getswitchinterval()
        pipe.send(path.address)
        busy = asyncio.Event()

        async def compute() -> None:
            while await busy.wait():
                sum(range(2_000))
                await asyncio.sleep(0)

        computing = loop.create_task(compute())
        while (order := await asyncio.to_thread(pipe.recv)) != "stop":
            if order == "times":
                pipe.send(engine.flipped_ns)
                continue
            sys.setswitchinterval(PYTHONS_SWITCH_INTERVAL_S if order == "busy_python" else ours)
            if order == "idle":
                busy.clear()
            else:
                busy.set()
            pipe.send(None)
        computing.cancel()
        path.stop()
        path.join(5)

    asyncio.run(main())


def make_celery(url: str) -> Celery:
    app = Celery("bench", broker=url.replace("unix://", "redis+socket://"))
    app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=1, task_acks_late=True)
    return app


def run_celery_worker(url: str, pipe: Connection) -> None:
    with open(os.devnull, "w") as nowhere:  # stdout is for the figures
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    app = make_celery(url)
    engine = TimedEngine()

    @app.task(name=TASK)
    def flip(epoch: int) -> None:
        engine.flip(NodeKey("node", epoch))

    def answer() -> None:
        while pipe.recv() == "times":
            pipe.send(engine.flipped_ns)

    threading.Thread(target=answer, daemon=True).start()
    app.worker_main(["-q", "worker", "-P", "solo", "--without-gossip", "--without-mingle", "-l", "ERROR"])


def ask(pipe: Connection, order: str) -> Any:
    pipe.send(order)
    return pipe.recv()


def signal_of(epoch: int) -> Signal:
    # A node of its own for each: a signal of an older incarnation would be refused as overtaken.
    return Signal(f"node-{epoch}", epoch, "terminate", "aws", datetime.now(UTC))


class Measurement:
    """Sends signals and remembers when."""

    def __init__(self) -> None:
        self.epoch = 0
        self.delays_ms: dict[str, list[float]] = {}

    def run(self, name: str, send: Callable[[Signal], Any], pipe: Connection) -> None:
        sent_ns: dict[int, int] = {}
        for _ in range(SIGNALS):
            self.epoch += 1
            sent_ns[self.epoch] = time.monotonic_ns()
            send(signal_of(self.epoch))
            time.sleep(GAP_S)
        flipped_ns = self._wait(pipe, self.epoch)
        self.delays_ms.setdefault(name, []).extend(
            (flipped_ns[epoch] - at) / 1e6 for epoch, at in sent_ns.items() if epoch in flipped_ns
        )

    @staticmethod
    def _wait(pipe: Connection, epoch: int) -> dict[int, int]:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            times: dict[int, int] = ask(pipe, "times")
            if epoch in times:
                return times
            time.sleep(0.05)
        raise SystemExit("signal_path: a signal did not arrive")

    def figures(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, delays in self.delays_ms.items():
            cuts = statistics.quantiles(delays, n=100)
            out[name] = {
                "p50": round(cuts[49], 3),
                "p99": round(cuts[98], 3),
                "max": round(max(delays), 3),
                "arrived": len(delays),
                "sent": SIGNALS * ROUNDS,
            }
        return out


@contextmanager
def process(target: Callable[..., None], url: str) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(url, theirs), daemon=True)
    child.start()
    theirs.close()  # so that the end of the child is an error here, and no endless wait
    try:
        yield ours
    finally:
        with suppress(OSError):
            ours.send("stop")
        child.join(3)
        child.terminate()
        child.join()


def measure(url: str) -> dict[str, Any]:
    client = connect(url)
    app = make_celery(url)
    result = Measurement()
    with process(run_gateway, url) as gateway, process(run_celery_worker, url) as worker:
        address: GatewayAddress = gateway.recv()
        book = GatewayBook(connect(url), threading.Event())
        while book.gateways != [address]:
            book.refresh()
        # As from another host: no unix socket has this name.
        remote = DatagramSender("elsewhere", address.host, address.port)

        def both(signal: Signal) -> None:
            book.send(signal, KEY)
            publish(client, signal, KEY)

        def task(signal: Signal) -> None:
            app.send_task(TASK, args=[signal.epoch])

        task(signal_of(0))
        Measurement._wait(worker, 0)  # the worker is up
        for _ in range(ROUNDS):
            result.run("datagram_unix", lambda signal: book.send(signal, KEY), gateway)
            result.run("datagram_udp", lambda signal: remote.send(signal.to_datagram(KEY)), gateway)
            result.run("stream", lambda signal: publish(client, signal, KEY), gateway)
            result.run("both", both, gateway)
            ask(gateway, "busy")
            result.run("both_busy_gateway", both, gateway)
            ask(gateway, "busy_python")
            result.run("both_busy_gateway_pythons_switch_interval", both, gateway)
            ask(gateway, "idle")
            result.run("celery", task, worker)
    return result.figures()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="apex-bench-") as folder:
        server = EmbeddedValkey(data=Path(folder) / "data", sockets=Path(folder) / "run")
        valkey = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
        try:
            server.wait_ready(valkey)
            figures = measure(server.url)
        finally:
            valkey.terminate()
            valkey.wait(10)
    print(json.dumps({"bench": "signal_path", "unit": "ms", "signals": SIGNALS * ROUNDS, **figures}))


if __name__ == "__main__":
    main()
