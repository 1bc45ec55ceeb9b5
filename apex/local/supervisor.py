"""Starts processes in order, keeps them alive and stops them in reverse. Why our own: decision 0002.

All work happens in one thread with an event loop. It has to be one thread that lives as long as the
children do, because the kernel's parent-death signal follows the thread that forked, not the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from apex.local.exits import describe_end, kill_tree, wait_exit
from apex.local.logs import LogSink
from apex.local.state import MARK, StateFolder

_CHILD = str(Path(__file__).with_name("child.py"))
_POLL_S = 0.05
_CRASHES = 5
_CRASH_WINDOW_S = 60.0
_BACK_OFF_S = 0.2
_BACK_OFF_MAX_S = 10.0
_PIPE_GRACE_S = 2.0
_CHUNK = 65_536

T = TypeVar("T")
Progress = Callable[[str, str], None]


class ProcessFailed(RuntimeError):
    """A process did not start, did not become ready or kept dying; the message says which and why."""


@dataclass(frozen=True)
class Spec:
    """One process. `environ` is all it sees, but for the mark of the stack; put no secret into `argv`.

    `prepare` runs before each start, `ready` is asked until it says yes; both may block for a short
    while. `once` means: ready is when it has ended with status 0.
    An `essential` process that keeps dying, or that may not be restarted, ends the whole stack.
    """

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    prepare: Callable[[], None] | None = None
    once: bool = False
    restart: bool = True
    essential: bool = True
    ready_timeout_s: float = 60.0
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 10.0
    user: str = ""
    folder: Path = Path("/")


class Process:
    """Handle of a supervised process. Methods block and may be called from any thread."""

    def __init__(self, spec: Spec, supervisor: Supervisor) -> None:
        self.spec = spec
        self.restarts = 0
        self._supervisor = supervisor
        self._child: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._ready = asyncio.Event()
        self._failure: str | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Of the process itself, which also leads its group; None while it does not run."""
        child = self._child
        return child.pid if child is not None and child.returncode is None else None

    def kill(self) -> None:
        """SIGKILL to the process alone, like a crash: it is started again. Returns when it is dead."""
        self._supervisor.call(self._kill())

    def kill_group(self) -> None:
        """SIGKILL to the process and all its descendants, like a machine that disappears. Not restarted."""
        self._supervisor.call(self._vanish())

    def stop(self) -> None:
        """Asks it to end, and after `stop_timeout_s` makes it. Not restarted."""
        self._supervisor.call(self._stop())

    def restart(self) -> None:
        """Stops it where it runs, and starts it. Returns when it is ready; raises ProcessFailed."""
        self._supervisor.call(self._restart())

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Blocks until it is ready, for example again after `kill`. Raises TimeoutError."""
        self._supervisor.call(asyncio.wait_for(self._ready.wait(), timeout_s))

    # --- below: in the supervisor's thread only ------------------------------------------------------

    async def _start(self) -> None:
        """Returns when it is ready for the first time; a death before that is a failure."""
        begun = time.monotonic()
        self._released.clear()
        self._failure = None
        self._supervisor.report(self.name, "starting")
        self._keeper = asyncio.create_task(self._keep())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._failure is not None:
            raise ProcessFailed(self._failure)
        if self._ready.is_set():
            self._supervisor.report(self.name, f"ready in {time.monotonic() - begun:.1f} s")

    async def _keep(self) -> None:
        """Runs it again and again until it is released or there is no hope."""
        crashes: deque[float] = deque(maxlen=_CRASHES)
        started = False
        while True:
            was_ready, ending = await self._run()
            started = started or was_ready
            if self._released.is_set() or (self.spec.once and was_ready):
                return
            crashes.append(time.monotonic())
            if not started or (self.spec.essential and self._is_hopeless(crashes)):
                said = self._supervisor.sink.last_lines(self.name)
                self._failure = f"{self.name} {ending}; log: {self._supervisor.sink.path(self.name)}" + (
                    f"; it said last: {said[-1].strip()}" if said else ""
                )
                if started:
                    self._supervisor.fail(self._failure)
                return
            pause_s = min(_BACK_OFF_S * 2 ** (len(crashes) - 1), _BACK_OFF_MAX_S)
            self._supervisor.report(self.name, f"{ending}; starting it again in {pause_s:.1f} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), pause_s)
                return
            self.restarts += 1

    def _is_hopeless(self, crashes: deque[float]) -> bool:
        if not self.spec.restart:
            return True
        return len(crashes) == _CRASHES and crashes[-1] - crashes[0] < _CRASH_WINDOW_S

    async def _run(self) -> tuple[bool, str]:
        """One life of the process: (whether it became ready, how it ended)."""
        try:
            if self.spec.prepare is not None:
                await asyncio.to_thread(self.spec.prepare)
        except (RuntimeError, OSError) as error:
            return False, f"could not be prepared: {error}"
        wrapper = [
            sys.executable,
            "-I",
            "-S",
            _CHILD,
            str(os.getpid()),
            str(int(self.spec.stop_signal)),
            self.spec.user,
        ]
        # Not asyncio's subprocess: its wait() does not return while a grandchild holds the pipe.
        child = self._child = subprocess.Popen(  # noqa: ASYNC220 - returns when the child exists
            [*wrapper, *self.spec.argv],
            env={**self.spec.environ, MARK: str(self._supervisor.state.var)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.spec.folder,
            start_new_session=True,
        )
        self._supervisor.take_note()
        pump = asyncio.create_task(self._pump(child))
        ended = asyncio.create_task(wait_exit(child))
        checked = asyncio.create_task(self._check_ready())
        try:
            await asyncio.wait(
                {ended, checked}, timeout=self.spec.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if checked.done() and (complaint := checked.exception()) is not None:
                return False, f"could not be checked: {complaint}"
            was_ready = checked.done()
            if was_ready and not ended.done():
                self._ready.set()
                await ended
            elif not ended.done():
                return False, f"was not ready within {self.spec.ready_timeout_s:.0f} s"
            if self.spec.once and child.returncode == 0:
                was_ready = True
                self._ready.set()
            return was_ready, describe_end(child.returncode)
        finally:
            if not self.spec.once:
                self._ready.clear()
            checked.cancel()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await ended
            # Somebody outside the group may still hold the pipe; do not wait for ever.
            await asyncio.wait({pump}, timeout=_PIPE_GRACE_S)
            pump.cancel()
            await asyncio.wait({pump})
            self._child = None
            self._supervisor.take_note()

    async def _check_ready(self) -> None:
        if self.spec.once:
            await asyncio.Event().wait()
        while self.spec.ready is not None and not await asyncio.to_thread(self.spec.ready):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _pump(self, child: subprocess.Popen[bytes]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), child.stdout
        )
        rest = b""
        try:
            while chunk := await reader.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _CHUNK:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._say(line)
        finally:
            transport.close()
            if rest:
                self._say(rest)

    def _say(self, line: bytes) -> None:
        self._supervisor.sink.write(self.name, line.decode(errors="replace").rstrip("\r"))

    async def _stop(self) -> None:
        self._released.set()
        child = self._child
        if child is not None and child.returncode is None:
            child.send_signal(self.spec.stop_signal)
            timeout_s = 0 if self._supervisor.hurried else self.spec.stop_timeout_s
            await asyncio.wait({asyncio.create_task(wait_exit(child))}, timeout=timeout_s)
        await self._vanish()

    async def _vanish(self) -> None:
        self._released.set()
        while True:
            if (pid := self.pid) is not None:
                kill_tree(pid)
            # In a loop, for it may have been just about to start when it was released.
            if self._keeper is None or (await asyncio.wait({self._keeper}, timeout=_POLL_S))[0]:
                return

    async def _kill(self) -> None:
        if (child := self._child) is not None and child.returncode is None:
            self._ready.clear()
            child.kill()
            await wait_exit(child)

    async def _restart(self) -> None:
        await self._stop()
        await self._start()


class Supervisor:
    """Owns the processes of one var folder. `start` step by step, then `wait`, then `close`.

    Raises AlreadyRunning when another supervisor has the folder. What an earlier one left is ended first.
    `progress(name, what)` is called from the supervisor's thread.
    """

    def __init__(self, var: Path, *, sink: LogSink, progress: Progress | None = None) -> None:
        self.state = StateFolder(var)
        self.sink = sink
        self.failure: str | None = None
        self.hurried = False
        self.addresses: dict[str, str] = {}
        self._progress = progress
        self._processes: list[Process] = []
        self._ended = threading.Event()
        self._lock: IO[str] = self.state.lock()
        self.leftovers = self.state.reap_leftovers()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="supervisor", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the supervisor's thread and returns its result."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, *specs: Spec) -> list[Process]:
        """Starts these at the same time and returns when all are ready. Raises ProcessFailed."""
        return self.call(self._start(specs))

    async def _start(self, specs: Sequence[Spec]) -> list[Process]:
        processes = [Process(spec, self) for spec in specs]
        self._processes += processes
        await asyncio.gather(*(process._start() for process in processes))
        return processes

    def replace(self, name: str, spec: Spec) -> None:
        """Starts `spec` beside the process of that name, which is expected to end by itself once the new one is ready.

        Raises ProcessFailed; then the one there was goes on.
        """
        self.call(self._replace(name, spec))

    async def _replace(self, name: str, spec: Spec) -> None:
        leaving, successor = self.process(name), Process(spec, self)
        leaving._released.set()
        try:
            await successor._start()
        except BaseException:
            leaving._released.clear()
            if leaving._keeper is not None and leaving._keeper.done():
                await leaving._start()
            raise
        # Before the other, so that its name finds it; both are stopped with the stack.
        self._processes.insert(self._processes.index(leaving), successor)
        if leaving._keeper is not None:
            leaving._keeper.add_done_callback(lambda _: self._processes.remove(leaving))

    def process(self, name: str) -> Process:
        return next(process for process in self._processes if process.name == name)

    def wait(self) -> None:
        """Blocks until a failure ends the stack; raises it as ProcessFailed."""
        self._ended.wait()
        raise ProcessFailed(self.failure or "stopped")

    def hurry(self) -> None:
        """From now on nobody gets time to end by itself."""
        self.hurried = True
        self._loop.call_soon_threadsafe(self._kill_all)

    def _kill_all(self) -> None:
        for process in self._processes:
            process._released.set()
            if (pid := process.pid) is not None:
                kill_tree(pid)

    def close(self) -> None:
        """Stops everything in reverse order and lets go of the folder. May be called twice."""
        if self._loop.is_closed():
            return
        self.call(self._stop_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self.sink.close()
        self.state.forget()
        self._lock.close()

    async def _stop_all(self) -> None:
        for process in reversed(self._processes):
            was_running = process.pid is not None
            await process._stop()
            if was_running:
                self.report(process.name, "stopped")
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # --- for Process ---------------------------------------------------------------------------------

    def report(self, name: str, what: str) -> None:
        if self._progress is not None:
            self._progress(name, what)

    def fail(self, reason: str) -> None:
        self.failure = reason
        self._ended.set()

    def take_note(self) -> None:
        running = [(process.name, process.pid) for process in self._processes if process.pid is not None]
        self.state.write(running, self.addresses)  # type: ignore[arg-type]
