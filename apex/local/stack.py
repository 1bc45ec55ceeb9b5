"""The whole platform on one machine: which processes, in which order, with which addresses."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from apex.local import probes
from apex.local.logs import LogSink
from apex.local.ondemand import no_command_uses_the_servers
from apex.local.paths import BASE_DIR
from apex.local.ports import Ports
from apex.local.postgres import EmbeddedPostgres
from apex.local.supervisor import Process, ProcessFailed, Progress, Spec, Supervisor
from apex.local.valkey import EmbeddedValkey
from kernel_steer.gateway.handover import incumbent_pid

NODES = ("node-a", "node-b")
SERVICES = ("migrate", "collectstatic", "paypal-stub", "metadata", "web", "worker", "beat", "gateway")
_PYTHON = (sys.executable, "-m")
_MANAGE = (sys.executable, str(BASE_DIR / "manage.py"))
_CELERY = (*_PYTHON, "celery", "-A", "apex")
_WORKER = (*_CELERY, "worker", "--without-gossip", "--without-mingle")
_WEB = (*_PYTHON, "gunicorn", "apex.wsgi", "--worker-class=gthread", "--threads=8", "--access-logfile=-")
_FIRST_NODE_PORT = 8101
# Room for a cold start on a busy machine: nothing waits longer than it has to.
_SLOW_START_S = 120.0
# What a gateway needs after its last answer.
_SETTLE_S = 15.0


def model_is_installed() -> bool:
    """Whether a local node can run a language model: the packages of requirements-demo.txt."""
    return importlib.util.find_spec("xllamacpp") is not None


class Stack:
    """`start()` returns when everything is ready, `stop()` when everything has ended. Also a context manager.

    `console=None` keeps the log lines in var/log only. `nodes` are the inference nodes to run here, and
    `only` limits what is started to these names; the embedded servers are added where they are needed.
    `progress(name, what)` is called from another thread and must not call back.
    Raises AlreadyRunning, PortTaken, ProcessFailed; each has a message of one line.
    """

    def __init__(
        self,
        *,
        nodes: Sequence[str] = NODES,
        only: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        console: TextIO | None = None,
        progress: Progress | None = None,
    ) -> None:
        given = dict(os.environ if environ is None else environ)
        self.nodes = tuple(node for node in nodes if not only or node in only)
        self.var = Path(given.get("APEX_VAR_DIR") or BASE_DIR / "var").resolve()
        self._given = given
        self._only = frozenset(only)
        self._progress = progress
        self._console = console
        self._supervisor: Supervisor | None = None
        self._database = None if given.get("DATABASE_URL", "").strip() else EmbeddedPostgres.at(self.var)
        self._store = None if given.get("REDIS_URL", "").strip() else EmbeddedValkey.at(self.var)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        sink = LogSink(self.var / "log", self._console)
        with no_command_uses_the_servers(self.var):
            self._supervisor = Supervisor(self.var, sink=sink, progress=self._progress)
        if self._progress is not None and (count := len(self._supervisor.leftovers)):
            self._progress("stack", f"ended {count} processes that an earlier run had left")
        self._supervisor.addresses = self.addresses
        for step in self._steps():
            wanted = [spec for spec in step if self._wants(spec.name)]
            if wanted:
                self._supervisor.start(*wanted)

    def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()

    def wait(self) -> None:
        """Blocks until a process fails for good; raises ProcessFailed with the reason."""
        self._running.wait()

    def hurry(self) -> None:
        """For the second Ctrl-C: nobody gets time to end by itself any more."""
        self._running.hurry()

    def process(self, name: str) -> Process:
        """Handle of a process: `.pid`, `.kill()`, `.kill_group()`, `.stop()`, `.restart()`, `.wait_ready()`."""
        return self._running.process(name)

    @property
    def failure(self) -> str | None:
        """Why the stack can not go on, or None while all is well."""
        return self._running.failure

    @property
    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("the stack was not started")
        return self._supervisor

    # --- addresses -----------------------------------------------------------------------------------

    @cached_property
    def addresses(self) -> dict[str, str]:
        """What was chosen, as environment variables. All processes get them."""
        ports = Ports(self._given)
        chosen: dict[str, str] = {"APEX_VAR_DIR": str(self.var)}
        if self._wants("web"):
            chosen["APEX_WEB_PORT"] = str(ports.choose("APEX_WEB_PORT", 8000))
            chosen["APEX_PUBLIC_URL"] = (
                self._given.get("APEX_PUBLIC_URL") or f"http://127.0.0.1:{chosen['APEX_WEB_PORT']}"
            )
        if self._wants("gateway"):
            port = str(ports.choose("APEX_GATEWAY_PORT", 8080, self._gateway_host))
            chosen["APEX_GATEWAY_PORT"] = port
            chosen["APEX_GATEWAY_PUBLIC_URL"] = (
                self._given.get("APEX_GATEWAY_PUBLIC_URL") or f"http://127.0.0.1:{port}"
            )
        if self._wants("paypal-stub"):
            chosen["PAYPAL_STUB_URL"] = f"http://127.0.0.1:{ports.choose('APEX_PAYPAL_STUB_PORT', 8099)}"
        if self._wants("metadata"):
            chosen["IMDS_AWS_URL"] = f"http://127.0.0.1:{ports.choose('APEX_METADATA_PORT', 8169)}"
        for index, node in enumerate(self.nodes):
            variable = self._node_variable(node)
            chosen[variable] = str(ports.choose(variable, _FIRST_NODE_PORT + index))
        return chosen

    @property
    def web_url(self) -> str:
        return self.addresses["APEX_PUBLIC_URL"]

    @property
    def gateway_url(self) -> str:
        return self.addresses["APEX_GATEWAY_PUBLIC_URL"]

    def urls(self) -> dict[str, str]:
        """What a person may open, by name, of the processes that run here."""
        urls = {}
        if self._wants("web"):
            web = self.web_url
            urls = {"portal": f"{web}/portal/", "back office": f"{web}/admin/", "API docs": f"{web}/v1/docs"}
            urls["health"] = f"{web}/v1/platform/health-matrix"
        if self._wants("gateway"):
            urls["gateway"] = f"{self.gateway_url}/v1"
        return urls

    def node_port(self, node: str) -> int:
        return int(self.addresses[self._node_variable(node)])

    @property
    def _gateway_host(self) -> str:
        return self._given.get("APEX_GATEWAY_HOST", "").strip() or "127.0.0.1"

    @staticmethod
    def _node_variable(node: str) -> str:
        return f"APEX_{node.upper().replace('-', '_')}_PORT"

    @property
    def environ(self) -> dict[str, str]:
        """What every process of the stack sees."""
        quiet = "ignore:You're running the worker with superuser" if os.geteuid() == 0 else ""
        return {"PYTHONWARNINGS": quiet, **self._given, **self.addresses, "PYTHONUNBUFFERED": "1"}

    @property
    def _broker_url(self) -> str:
        url = self._store.url if self._store is not None else self._given["REDIS_URL"].strip()
        return url.replace("unix://", "redis+socket://", 1)

    # --- processes -----------------------------------------------------------------------------------

    def _wants(self, name: str) -> bool:
        if name == "paypal-stub" and (self._given.get("PAYPAL_MODE", "").strip() or "stub") != "stub":
            return False
        if name == "metadata" and not self._only:
            return bool(self.nodes)
        return not self._only or name in self._only or name in {"postgres", "valkey"}

    def _steps(self) -> list[list[Spec]]:
        """Processes of one step start together; the next step starts when all of them are ready."""
        return [
            self._servers(),
            [
                self._service("migrate", *_MANAGE, "migrate", "--no-input", "--verbosity=0", once=True),
                *self._static(),
            ],
            [*self._helpers(), *self._services()],
            [self._node(name) for name in self.nodes],
        ]

    def _service(
        self, name: str, *argv: str, environ: Mapping[str, str] | None = None, **options: object
    ) -> Spec:
        return Spec(
            name=name,
            argv=argv,
            environ={**self.environ, **(environ or {})},
            folder=BASE_DIR,
            **{"ready_timeout_s": _SLOW_START_S, **options},  # type: ignore[arg-type]
        )

    def _servers(self) -> list[Spec]:
        specs = []
        if (database := self._database) is not None:
            specs.append(
                Spec(
                    name="postgres",
                    argv=database.command(),
                    environ={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
                    prepare=database.initialise,
                    ready=probes.postgres_provisioned(database),
                    user=database.user or "",
                    # SIGINT is PostgreSQL's fast and clean stop; SIGTERM would wait for clients.
                    stop_signal=signal.SIGINT,
                    stop_timeout_s=30.0,
                )
            )
        if (store := self._store) is not None:
            specs.append(
                Spec(
                    name="valkey", argv=store.command(), environ={"PATH": os.defpath}, ready=store.is_running
                )
            )
        return specs

    def _static(self) -> list[Spec]:
        stamp, digest = self.var / "run" / "static.stamp", _static_digest()
        if (
            stamp.exists()
            and stamp.read_text() == digest
            and (BASE_DIR / "staticfiles" / "staticfiles.json").exists()
        ):
            return []
        collect = (*_MANAGE, "collectstatic", "--no-input", "--verbosity=0")
        script = '"$@" && printf %s "$DIGEST" > "$STAMP"'
        return [
            self._service(
                "collectstatic", "/bin/sh", "-c", script, "sh", *collect,
                environ={"DIGEST": digest, "STAMP": str(stamp)}, once=True,
            )
        ]  # fmt: skip

    def _helpers(self) -> list[Spec]:
        """Stand-ins for the outside world: the payment provider and the cloud's metadata service."""
        specs = []
        if url := self.addresses.get("PAYPAL_STUB_URL"):
            argv = [*_PYTHON, "ledger.paypal.stub", "--port", url.rpartition(":")[2]]
            argv += ["--state", str(self.var / "paypal-stub")]
            if self._wants("web"):
                argv += ["--webhook-url", f"{self.web_url}/v1/webhooks/paypal"]
                argv += ["--ipn-url", f"{self.web_url}/v1/paypal/ipn"]
            specs.append(self._service("paypal-stub", *argv, ready=probes.http_answers(f"{url}/healthz")))
        if self._wants("metadata"):
            url = self.addresses["IMDS_AWS_URL"]
            argv = [*_PYTHON, "apex.local.metadata_service", "--port", url.rpartition(":")[2]]
            specs.append(self._service("metadata", *argv, ready=probes.http_answers(f"{url}/healthz")))
        return specs

    def _services(self) -> list[Spec]:
        specs = []
        if self._wants("web"):
            port = self.addresses["APEX_WEB_PORT"]
            bind = f"127.0.0.1:{port}"
            argv = [*_WEB, f"--bind={bind}", "--no-control-socket"]
            specs.append(self._service("web", *argv, ready=probes.http_ok(f"http://{bind}/healthz")))
        if self._wants("worker"):
            name = f"control@{socket.gethostname()}"
            argv = [*_WORKER, "-Q", "celery", "-P", "threads", "-c", "4", "-n", name]
            specs.append(self._service("worker", *argv, ready=probes.celery_answers(self._broker_url, name)))
        if self._wants("beat"):
            schedule = str(self.var / "run" / "beat-schedule")
            # An empty pid file name means none: the stack's own lock is enough, and dies with us.
            specs.append(self._service("beat", *_CELERY, "beat", "--schedule", schedule, "--pidfile="))
        if self._wants("gateway"):
            specs.append(self._gateway())
        return specs

    def _gateway(self) -> Spec:
        port, host = self.addresses["APEX_GATEWAY_PORT"], self._gateway_host
        own = "127.0.0.1" if host in {"0.0.0.0", "::"} else host
        argv = [*_MANAGE, "gateway", "--host", host, "--port", port]
        ready = probes.http_ok(f"http://{own}:{port}/healthz")
        drain_s = float(self._given.get("APEX_GATEWAY_DRAIN_S", "").strip() or 30)
        return self._service("gateway", *argv, ready=ready, stop_timeout_s=drain_s + _SETTLE_S)

    def replace_gateway(self) -> None:
        """A new gateway takes the port over; the old one finishes its answers and ends. Raises ProcessFailed."""
        if not self._wants("gateway"):
            raise ProcessFailed("no gateway runs here")
        spec = self._gateway()
        folder = self.var / f"gateway-{self.addresses['APEX_GATEWAY_PORT']}"
        before = incumbent_pid(folder)
        successor = replace(
            spec,
            argv=[*spec.argv, "--take-over"],
            ready=lambda: incumbent_pid(folder) not in {None, before},
        )
        self._running.replace("gateway", successor)

    def _node(self, node: str) -> Spec:
        """A GPU node in miniature. Its death is the daily business of the platform, so not essential."""
        port, name = self.node_port(node), f"node@{node}"
        argv = [*_WORKER, "-n", name, "-Q", f"node.{node}", "-P", "solo"]
        environ = {
            "APEX_NODE_NAME": node,
            "APEX_NODE_PORT": str(port),
            "APEX_NODE_ENGINE": self._given.get("APEX_NODE_ENGINE", "").strip() or "llamacpp",
        }
        if "IMDS_AWS_URL" in self.addresses:
            environ["IMDS_AWS_URL"] = f"{self.addresses['IMDS_AWS_URL']}/{node}"
        ready = probes.every(
            probes.http_ok(f"http://127.0.0.1:{port}/health"), probes.celery_answers(self._broker_url, name)
        )
        return self._service(node, *argv, environ=environ, ready=ready, essential=False)


def _static_digest() -> str:
    """Changes when a static file of ours or an installed package does."""
    digest = hashlib.sha256((BASE_DIR / "requirements.txt").read_bytes())
    for path in sorted((BASE_DIR / "static").rglob("*")):
        if path.is_file():
            status = path.stat()
            digest.update(f"{path}:{status.st_size}:{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
