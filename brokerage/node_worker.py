"""The node worker: a Celery worker on a GPU machine that runs its engine and listens for its eviction.

A bootstep of the worker, added where APEX_NODE_NAME is set (docs/nodes.md). It never touches the
database: a GPU machine has the broker's address and nothing more.
"""

from __future__ import annotations

import http.client
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery, bootsteps
from celery.signals import worker_shutting_down
from django.conf import settings

from brokerage.eviction import Announcer
from kernel_steer import tokenizer_shelf
from kernel_steer.admission import Resume
from kernel_steer.listener.base import Listener, Notice
from kernel_steer.listener.providers import NO_PROVIDER, make_source
from kernel_steer.node.child import Keeper
from kernel_steer.node.identity import Engine, Identity, IdentityUnknown, identify
from kernel_steer.signals.stream import connect

logger = logging.getLogger(__name__)

RECORD_HEARTBEAT = "brokerage.tasks.record_heartbeat"
HEARTBEAT_S = 2.0
# Heartbeats that nobody fetched in this time are worth nothing, and must not pile up.
_HEARTBEAT_EXPIRES_S = 10
# RunPod and others kill 5 s after SIGTERM.
_FAREWELL_S = 4.0
_PROBE_TIMEOUT_S = 1.5
_SHELVE_EVERY_S = 60.0
# Running and waiting requests in the engine's Prometheus page, labels or none.
_IN_WORK = re.compile(
    rb"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)(?:\{[^}\n]*\})? ([0-9.e+]+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What this machine serves and where. `engine_url` None means: run llama.cpp and the adapter here.

    With `tgi_url` the engine there gets an adapter here. `host` and `port` are where gateways find the node; `context` is in tokens per answer. `tokenizer` and
    `revision` are for an engine whose own are not found or not right.
    """

    name: str
    host: str
    port: int
    model: str
    slots: int
    context: int
    engine_url: str | None = None
    provider: str = "aws"  # whose metadata service announces the end of this machine, or NO_PROVIDER
    tokenizer: str = ""
    revision: str = ""
    resume: Resume = Resume.IDS
    reasoning: bool = False  # staff's word, where the engine does not show it
    tgi_url: str | None = None

    def commands(self) -> dict[str, Sequence[str]]:
        """The programs to keep running: none where an engine that speaks the dialect runs already."""
        if self.engine_url is not None:
            return {}
        python = (sys.executable, "-m")
        adapter = (
            *python,
            "kernel_steer.node.adapter",
            f"--host={self.host}",
            f"--port={self.port}",
            f"--served-model={self.model}",
            f"--context={self.context}",
            f"--tokenizer={self.tokenizer}",
            f"--revision={self.revision}",
        )
        if self.tgi_url is not None:
            return {"adapter": (*adapter, "--engine=tgi", f"--engine-url={self.tgi_url}")}
        engine_port = _free_port()
        return {
            "llama.cpp": (
                *python,
                "kernel_steer.node.llama_server",
                f"--port={engine_port}",
                f"--slots={self.slots}",
                f"--context={self.context}",
            ),
            "adapter": (*adapter, f"--engine-url=http://127.0.0.1:{engine_port}"),
        }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class NodeWorker:
    """Everything that runs beside the Celery worker: children, heartbeat, listener, farewell."""

    def __init__(self, config: NodeConfig, app: Celery) -> None:
        self.config = config
        self.epoch = time.time_ns() // 1_000_000
        self._app = app
        self._stop = threading.Event()
        self._leaving = threading.Event()
        self._identity: Identity | None = None
        self._engine_was_away = True  # another one may have come in its place
        self._trouble = ""
        self._shelved_at = 0.0
        self._reachable = True
        self._keeper = Keeper(config.commands(), self._stop)
        self._announcer = Announcer(app=app, node=config.name, epoch=self.epoch)
        self._listener = self._make_listener()
        self._heart = threading.Thread(target=self._beat, name="node-heartbeat", daemon=True)
        self._farewell = threading.Thread(target=self._say_farewell, name="node-farewell", daemon=True)

    def _make_listener(self) -> Listener | None:
        if self.config.provider == NO_PROVIDER:
            return None
        base_url = getattr(settings, f"IMDS_{self.config.provider.upper()}_URL")
        return Listener(
            make_source(self.config.provider, base_url, self.config.name),
            self._announcer.announce,
            on_cancelled=self._take_back,
            is_drained=self._is_drained,
            stop=self._stop,
        )

    def start(self) -> None:
        """Returns at once; the node is reported healthy when its engine answers."""
        self._announcer.start()
        for thread in (self._keeper, self._listener, self._heart, self._farewell):
            if thread is not None:
                thread.start()

    def leave(self, **_: Any) -> None:
        """Begins to say that the node goes away. Safe in a signal handler: it only sets an event."""
        self._leaving.set()

    def stop(self) -> None:
        """Says that the node goes away, for a few seconds at most, and only then ends the children."""
        self.leave()
        self._farewell.join(timeout=_FAREWELL_S)
        self._announcer.stop()
        self._stop.set()
        for thread in (self._keeper, self._farewell, self._heart):
            thread.join(timeout=_FAREWELL_S)

    def _take_back(self, notice: Notice) -> None:
        if not self._leaving.is_set():
            self._announcer.cancel(notice)

    def _is_drained(self, notice: Notice) -> bool:
        """Whether the gateways and the books know, and the engine has no answer in work any more."""
        return self._announcer.flush(0) and self._answers_in_work() == 0

    def _answers_in_work(self) -> int | None:
        """From the engine's own metrics (vLLM and SGLang have them); None when it does not say."""
        try:
            status, body = self._get("/metrics")
        except (OSError, http.client.HTTPException):
            return None
        if status != 200:
            return None
        counts = [float(count) for count in _IN_WORK.findall(body)]
        return int(sum(counts)) if counts else None

    def _say_farewell(self) -> None:
        self._leaving.wait()
        self._announcer.announce(Notice("sigterm", "terminate", None, self.config.name))
        self._announcer.flush(_FAREWELL_S)

    # --- heartbeat -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._stop.is_set():
            healthy = self._probe()
            try:
                self._app.send_task(
                    RECORD_HEARTBEAT,
                    kwargs={
                        "name": self.config.name,
                        "epoch": self.epoch,
                        "host": self.config.host,
                        "port": self.config.port,
                        "model": self.config.model,
                        "slots": self.config.slots,
                        "healthy": healthy,
                        **self._told_identity(),
                    },
                    queue="celery",
                    expires=_HEARTBEAT_EXPIRES_S,
                    retry=False,
                )
                self._reachable = True
            except Exception as error:  # noqa: BLE001 - a broker that is away is no reason to fall silent
                if self._reachable:
                    logger.warning("broker unreachable (%s), heartbeats pause", type(error).__name__)
                self._reachable = False
            self._stop.wait(HEARTBEAT_S)

    def _probe(self) -> bool:
        """Whether the node answers. An engine that has just come is asked who it is."""
        try:
            if self._get("/health")[0] != 200:
                self._engine_was_away = True
                return False
            if self._engine_was_away:
                self._identify()
        except (OSError, http.client.HTTPException):
            self._engine_was_away = True
            return False
        self._keep_on_the_shelf()
        return True

    def _identify(self) -> None:
        config = self.config
        try:
            self._identity = identify(
                Engine(config.host, config.port),
                model=config.model,
                tokenizer=config.tokenizer,
                revision=config.revision,
                resume=config.resume,
                reasoning=config.reasoning,
            )
        except IdentityUnknown as error:
            if str(error) != self._trouble:
                logger.error("node %s does not know what it serves: %s", config.name, error)
            self._identity, self._trouble = None, str(error)
            return  # and asks again: a file may be put there
        self._engine_was_away, self._trouble, self._shelved_at = False, "", 0.0

    def _told_identity(self) -> dict[str, Any]:
        known = self._identity
        return {
            "engine": known.engine if known else "",
            "revision": known.revision if known else "",
            "tokenizer_id": known.tokenizer_id if known else "",
            "template_id": known.template_id if known else "",
            "capabilities": sorted(known.capabilities) if known else [],
            "trouble": self._trouble,
        }

    def _keep_on_the_shelf(self) -> None:
        """Gateways decode ids themselves, and an engine without an adapter does not give its tokenizer away."""
        known, now = self._identity, time.monotonic()
        if known is None or known.tokenizer is None or now < self._shelved_at + _SHELVE_EVERY_S:
            return
        try:
            with connect(settings.REDIS_URL) as client:
                tokenizer_shelf.put(client, known.tokenizer_id, known.tokenizer)
        except (redis.RedisError, OSError) as error:
            logger.warning("the tokenizer could not be put into Redis (%s)", type(error).__name__)
            return
        self._shelved_at = now

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.config.host, self.config.port, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def node_step(config: NodeConfig) -> type[bootsteps.StartStopStep]:
    """The bootstep for `app.steps["worker"]`. Built for one configuration, as Celery takes a class."""

    class NodeStep(bootsteps.StartStopStep):
        requires = ("celery.worker.components:Timer",)

        def __init__(self, worker: Any, **options: Any) -> None:
            super().__init__(worker, **options)
            self.node = NodeWorker(config, worker.app)

        def start(self, worker: Any) -> None:
            # Sent from the signal handler, before Celery waits for running tasks.
            worker_shutting_down.connect(self.node.leave)
            self.node.start()

        def stop(self, worker: Any) -> None:
            self.node.stop()
            worker_shutting_down.disconnect(self.node.leave)

        terminate = stop

    return NodeStep
