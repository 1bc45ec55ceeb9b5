"""The gateway process: listen, serve, drain, and settle what a crash left behind."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from kernel_steer.admission import Admission, Answer, LegReport, Outcome, Refusal
from kernel_steer.engine import complete_journals, select_engine
from kernel_steer.gateway.api import Gateway
from kernel_steer.gateway.descriptors import raise_file_limit
from kernel_steer.gateway.handover import Handover, Predecessor
from kernel_steer.gateway.http import ClientConnection, ConnectionClosed, error_response
from kernel_steer.gateway.journals import Caretaker, open_journal
from kernel_steer.gateway.moves import Moves
from kernel_steer.gateway.signal_path import RefusalsHook, SignalPath
from kernel_steer.gateway.steering import Steering
from kernel_steer.journal import Journal, Left
from kernel_steer.ports import PortServer
from kernel_steer.resume.recount import recount
from kernel_steer.resume.tokens import TokenizerStore
from kernel_steer.resume.work import Limits, Services
from kernel_steer.tokenizer_shelf import shelf_in

log = logging.getLogger("kernel_steer.gateway")
_BACKLOG = 1024
_SIGNALS_END_S = 2.0
_SETTLED_S = 10.0
_PAUSE_S = 0.1
_LAST_REQUEST_S = 0.5


@dataclass(frozen=True, slots=True)
class Config:
    host: str
    port: int
    engine: str
    state_dir: Path  # journal and tokenizers
    redis_url: str
    signal_key: bytes
    answers_max: int = 1024  # at a time; each has a slot of the journal, and of the kernel's maps
    drain_s: float = 30.0
    take_over: bool = False  # from the gateway that has the port now, if there is one
    limits: Limits = field(default_factory=Limits)
    signal_host: str = "127.0.0.1"  # where nodes send eviction signals by UDP
    signal_port: int = 0  # 0: any
    on_refused_signals: RefusalsHook | None = None


class AddressInUse(RuntimeError):
    """Somebody else listens there; the message names the address."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Plain TCP by name: MPTCP sockets cannot be steered. Raises AddressInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise AddressInUse(f"cannot listen on {host}:{port}: {error.strerror}") from error
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


async def serve(config: Config, admission: Admission, *, ready: Callable[[int], None] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a successor, then lets open answers finish for `drain_s` seconds."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    predecessor = await asyncio.to_thread(Predecessor.find, config.state_dir) if config.take_over else None
    raise_file_limit(config.answers_max)
    choice = select_engine(config.engine, flows_max=config.answers_max)
    log.info("engine %s: %s", choice.engine.name, choice.reason)
    listener = predecessor.listener if predecessor else listen(config.host, config.port)
    journal = open_journal(config.state_dir, config.answers_max)
    try:
        await admission.start()
        moves = Moves()
        steering = Steering(choice.engine, admission, loop, moves)
        services = Services(
            admission=admission,
            engine=choice.engine,
            tokenizers=TokenizerStore(config.state_dir / "tokenizers", shelf_in(config.redis_url)),
            limits=config.limits,
            on_first_byte=steering.first_byte,
        )
        gateway = Gateway(services, journal, choice, moves, steering.stats)
        await recover(journal, admission)
        caretaker = Caretaker(config.state_dir, journal, lambda left: recover(left, admission))
        caring = asyncio.create_task(caretaker.run(), name="caretaker")
        signals = _signal_path(config, steering, beside_another=predecessor is not None)
        signals.start()
        ports = gateway.ports = PortServer(choice.engine, host=config.host)
        following = asyncio.create_task(ports.follow(admission.endpoints), name="steered ports")
        stopping = asyncio.create_task(_drain_ports(config, ports, following, stop))
        try:
            await _serve_clients(config, gateway, listener, predecessor, stop, ready)
            await stopping
        finally:
            for task in (following, stopping):
                task.cancel()
            await ports.close()
            caring.cancel()
            signals.stop()
        await gateway.settled(_SETTLED_S)
        services.upstreams.close()
        await asyncio.to_thread(signals.join, _SIGNALS_END_S)
    finally:
        listener.close()
        await admission.stop()
        choice.engine.close()
        journal.close()


async def _drain_ports(
    config: Config, ports: PortServer, following: asyncio.Task[None], stop: asyncio.Event
) -> None:
    """As soon as the gateway is told to stop: a successor opens the same ports when they are free."""
    await stop.wait()
    following.cancel()
    await asyncio.wait([following])
    await ports.drain(config.drain_s)


async def _serve_clients(
    config: Config,
    gateway: Gateway,
    listener: socket.socket,
    predecessor: Predecessor | None,
    stop: asyncio.Event,
    ready: Callable[[int], None] | None,
) -> None:
    connections = Connections(gateway, listener)
    accepting = asyncio.create_task(connections.accept())
    await asyncio.sleep(0)  # it has begun
    handover = Handover(config.state_dir, listener, on_taken=stop.set)
    handover.start()
    port = listener.getsockname()[1]
    log.info("listening on %s:%d%s", config.host, port, ", taken over" if predecessor else "")
    if predecessor is not None:
        await asyncio.to_thread(predecessor.ready)
    if ready is not None:
        ready(port)
    await stop.wait()
    log.info("draining: %d answers open%s", gateway.journal.in_use, ", handed over" if handover.taken else "")
    gateway.draining = True
    accepting.cancel()
    await asyncio.wait([accepting])
    if not handover.taken:  # a successor has the same queue, and answers who waits in it
        connections.take_waiting()
    listener.close()
    await handover.close()
    await connections.drain(config.drain_s)


def _signal_path(config: Config, steering: Steering, *, beside_another: bool = False) -> SignalPath:
    """`beside_another`: a gateway that is about to leave may have the port still; nodes learn of any other."""
    try:
        return SignalPath(
            steering,
            redis_url=config.redis_url,
            key=config.signal_key,
            host=config.signal_host,
            port=config.signal_port,
            on_refused=config.on_refused_signals,
        )
    except OSError as error:
        if beside_another and config.signal_port:
            return _signal_path(replace(config, signal_port=0), steering)
        raise AddressInUse(
            f"cannot receive signals on {config.signal_host}:{config.signal_port}: {error.strerror}"
        ) from error


class Connections:
    """Accepts clients and keeps track of them."""

    def __init__(self, gateway: Gateway, listener: socket.socket) -> None:
        self._gateway = gateway
        self._listener = listener
        self._fd = listener.fileno()
        self._open: dict[asyncio.Task[None], bool] = {}  # task -> a request is being read or answered
        self._pause: asyncio.TimerHandle | None = None

    async def accept(self) -> None:
        """Takes clients until it is cancelled."""
        try:
            self._listen()
            await asyncio.get_running_loop().create_future()
        finally:
            asyncio.get_running_loop().remove_reader(self._fd)
            if self._pause is not None:
                self._pause.cancel()

    def take_waiting(self) -> None:
        """Those too that the system has accepted for us by now: it would reset them with the listener."""
        self._take()

    def _listen(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._fd, self._take)

    def _take(self) -> None:
        # Not sock_accept in a task: cancelling it could lose a client that it had just accepted.
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: others will be closed soon
                if error.errno == errno.ECONNABORTED:
                    continue
                log.warning("cannot accept: %s", error.strerror)
                loop.remove_reader(self._fd)
                self._pause = loop.call_later(_PAUSE_S, self._listen)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._serve(ClientConnection(sock)))
            self._open[task] = False
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)

    async def _serve(self, connection: ClientConnection) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while True:
                await connection.wait_for_more()
                self._open[task] = True
                if not await self._gateway.handle(connection, await connection.read_request()):
                    break
                self._open[task] = False
        except ConnectionClosed:
            pass
        except Refusal as refusal:  # an unreadable request: answer and hang up
            await self._say(connection, refusal)
        except Exception:
            log.exception("a request failed")
            await self._say(connection, Refusal(500, "internal_error", "The gateway failed on this request."))
        finally:
            await connection.close()

    @staticmethod
    async def _say(connection: ClientConnection, refusal: Refusal) -> None:
        with suppress(ConnectionClosed):
            await connection.write(error_response(refusal, request_id="-", close=True))

    async def drain(self, timeout_s: float) -> None:
        """Idle connections are closed, the others when their answer is complete.

        Not at once: what a client has just sent, or is about to, is answered; only then it is told to go.
        """
        deadline = time.monotonic() + timeout_s
        if self._open:
            await asyncio.wait(list(self._open), timeout=min(_LAST_REQUEST_S, timeout_s))
        for task, busy in list(self._open.items()):
            if not busy:
                task.cancel()
        if self._open:
            await asyncio.wait(list(self._open), timeout=max(0.0, deadline - time.monotonic()))
        leftover = list(self._open)
        for task in leftover:
            task.cancel()
        if leftover:
            await asyncio.wait(leftover, timeout=5)


async def recover(journal: Journal, admission: Admission) -> None:
    """Charges exactly what a dead gateway had delivered, and releases what it had only held."""
    await asyncio.to_thread(complete_journals, journal.left_slots)
    for left in journal.left_behind():
        try:
            await _settle_left(left, admission)
        except Exception:
            log.exception("an answer of the gateway before cannot be settled now; its slot stays reserved")
            continue
        journal.free(left.slot)


async def _settle_left(left: Left, admission: Admission) -> None:
    if left.record is None:
        return  # killed before the id was on record: nothing was held
    request_id = left.record["request_id"]
    if "ticket" not in left.record:
        await admission.abandon(request_id, {})
        return
    counted = recount(left.checkpoint, left.tail)
    log.info("request %s was cut by a crash after %d tokens", request_id, counted.completion_tokens)
    started_at = datetime.fromtimestamp(left.record["started_at"], UTC)
    leg = LegReport(counted.leg, "unknown", counted.prompt_tokens, counted.completion_tokens, "gateway_lost")
    await admission.settle(
        Answer(
            request_id=request_id,
            record=left.record["ticket"],
            outcome=Outcome.RECOVERED,
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            legs=[leg],
            started_at=started_at,
            finished_at=max(started_at, datetime.now(UTC)),
        )
    )
