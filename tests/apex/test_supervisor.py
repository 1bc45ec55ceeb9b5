"""The supervisor on small stand-in processes: order, readiness, crashes, and its own death."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from apex.local.logs import LogSink
from apex.local.state import MARK, AlreadyRunning, StateFolder
from apex.local.supervisor import ProcessFailed, Spec, Supervisor
from tests.apex.waiting import wait_until

# Ends on SIGTERM and says so; `exec` would lose the trap.
_POLITE = 'trap "echo $0 >> {order}; exit 0" TERM; echo up; while :; do sleep 0.05; done'


class Console(io.StringIO):
    def __init__(self, *, terminal: bool = False) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def events() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def console() -> Console:
    return Console()


@pytest.fixture
def supervisor(tmp_path: Path, events: list[tuple[str, str]], console: Console) -> Iterator[Supervisor]:
    sink = LogSink(tmp_path / "log", console)
    made = Supervisor(tmp_path, sink=sink, progress=lambda name, what: events.append((name, what)))
    yield made
    made.close()


def shell(name: str, script: str, **options: object) -> Spec:
    return Spec(name, ["sh", "-c", script, name], environ={"PATH": os.defpath}, **options)  # type: ignore[arg-type]


def marked(var: Path) -> list[int]:
    """Processes on this machine that belong to the stack of `var`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(var) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


# --- start and stop -----------------------------------------------------------------------------------


def test_the_next_step_starts_when_the_one_before_is_ready(supervisor, tmp_path, events):
    flag = tmp_path / "flag"
    supervisor.start(shell("first", f"sleep 0.2; touch {flag}; sleep 60", ready=flag.exists))
    supervisor.start(shell("second", "sleep 60"))
    assert [(name, what.split(" in ")[0]) for name, what in events] == [
        ("first", "starting"),
        ("first", "ready"),
        ("second", "starting"),
        ("second", "ready"),
    ]


def test_stops_in_reverse_order(supervisor, tmp_path, events):
    order = tmp_path / "order"
    for name in ("one", "two", "three"):
        script = _POLITE.format(order=order)
        supervisor.start(shell(name, script))
        wait_until(lambda name=name: "up" in supervisor.sink.last_lines(name))
    supervisor.close()
    assert order.read_text().split() == ["three", "two", "one"]
    assert [name for name, what in events if what == "stopped"] == ["three", "two", "one"]
    assert marked(tmp_path) == []


def test_a_process_that_ignores_the_stop_signal_is_killed_with_all_it_started(supervisor, tmp_path):
    script = 'trap "" TERM; setsid sleep 60 & sleep 60 & echo up; while :; do sleep 0.05; done'
    supervisor.start(shell("stubborn", script, stop_timeout_s=0.2))
    wait_until(lambda: len(marked(tmp_path)) >= 3)
    supervisor.close()
    assert marked(tmp_path) == []


def test_a_second_interrupt_need_not_wait_for_a_slow_stop(supervisor, tmp_path):
    script = 'trap "" TERM; echo up; while :; do sleep 0.05; done'
    supervisor.start(shell("slow", script, stop_timeout_s=600))
    wait_until(lambda: supervisor.sink.last_lines("slow") == ["up"])
    closing = threading.Thread(target=supervisor.close)
    closing.start()
    supervisor.hurry()
    closing.join(timeout=20)
    assert not closing.is_alive()
    assert marked(tmp_path) == []


def test_a_process_sees_the_given_environment_and_no_other(supervisor, tmp_path):
    spec = Spec("env", ["env"], environ={"PATH": os.defpath, "GREETING": "hello"}, once=True)
    supervisor.start(spec)
    lines = (tmp_path / "log" / "env.log").read_text().splitlines()
    assert sorted(line for line in lines if not line.startswith("LC_CTYPE=")) == sorted(
        [f"PATH={os.defpath}", "GREETING=hello", f"{MARK}={tmp_path}"]
    )


# --- failures -------------------------------------------------------------------------------------------


def test_a_failed_one_shot_is_named_with_what_it_said_and_where_its_log_is(supervisor, tmp_path):
    with pytest.raises(ProcessFailed) as caught:
        supervisor.start(shell("job", "echo no such table; exit 3", once=True))
    assert str(caught.value) == (
        f"job ended with status 3; log: {tmp_path / 'log' / 'job.log'}; it said last: no such table"
    )


def test_a_process_that_does_not_become_ready_in_time_fails_the_start(supervisor, tmp_path):
    with pytest.raises(ProcessFailed, match="deaf was not ready within 0 s"):
        supervisor.start(shell("deaf", "sleep 60", ready=lambda: False, ready_timeout_s=0.3))
    assert marked(tmp_path) == []


def test_a_death_before_readiness_fails_the_start_at_once(supervisor):
    with pytest.raises(ProcessFailed, match="short was killed by SIGKILL"):
        supervisor.start(shell("short", "kill -9 $$", ready=lambda: False))


def test_a_program_that_is_not_there(supervisor):
    with pytest.raises(ProcessFailed, match="cannot run /no/such/program: No such file or directory"):
        supervisor.start(Spec("ghost", ["/no/such/program"], ready=lambda: False))


def test_a_failing_preparation_fails_the_start(supervisor):
    def prepare() -> None:
        raise RuntimeError("no disk")

    with pytest.raises(ProcessFailed, match="unprepared could not be prepared: no disk"):
        supervisor.start(shell("unprepared", "sleep 60", prepare=prepare))


def test_a_broken_readiness_check_is_told_and_not_taken_for_ready(supervisor):
    def ready() -> bool:
        raise ValueError("wrong address")

    with pytest.raises(ProcessFailed, match="odd could not be checked: wrong address"):
        supervisor.start(shell("odd", "sleep 60", ready=ready))


def test_a_crashed_process_is_started_again(supervisor, events):
    [process] = supervisor.start(shell("web", "sleep 60"))
    before = process.pid
    process.kill()
    process.wait_ready(20)
    assert process.pid not in {None, before}
    assert process.restarts == 1
    assert supervisor.failure is None
    assert ("web", "was killed by SIGKILL; starting it again in 0.2 s") in events


def test_the_stack_ends_with_the_reason_when_an_essential_process_may_not_be_restarted(supervisor):
    [process] = supervisor.start(shell("core", "sleep 60", restart=False))
    process.kill()
    with pytest.raises(ProcessFailed, match="core was killed by SIGKILL"):
        supervisor.wait()


def test_the_stack_ends_when_an_essential_process_keeps_dying(supervisor, monkeypatch):
    monkeypatch.setattr("apex.local.supervisor._BACK_OFF_S", 0.01)
    supervisor.start(shell("loop", "echo out of luck; exit 7"))
    with pytest.raises(ProcessFailed, match=r"loop ended with status 7; .* it said last: out of luck"):
        supervisor.wait()


def test_a_process_that_is_not_essential_may_keep_dying(supervisor, monkeypatch):
    monkeypatch.setattr("apex.local.supervisor._BACK_OFF_S", 0.01)
    monkeypatch.setattr("apex.local.supervisor._BACK_OFF_MAX_S", 0.01)
    [process] = supervisor.start(shell("node", "exit 7", essential=False))
    wait_until(lambda: process.restarts > 8)
    assert supervisor.failure is None


def test_kill_group_is_a_machine_that_disappears(supervisor, tmp_path):
    [node] = supervisor.start(shell("node", "setsid sleep 60 & sleep 60 & sleep 60; true"))
    wait_until(lambda: len(marked(tmp_path)) >= 4)
    node.kill_group()
    assert node.pid is None
    assert marked(tmp_path) == []
    assert node.restarts == 0
    node.restart()
    assert node.pid is not None


# --- output ---------------------------------------------------------------------------------------------


def test_lines_go_to_the_console_with_a_prefix_and_to_a_file_without(supervisor, console, tmp_path):
    supervisor.start(shell("talker", "echo hello; printf 'no \\377 end'", once=True))
    assert console.getvalue() == "talker       | hello\ntalker       | no \N{REPLACEMENT CHARACTER} end\n"
    assert (tmp_path / "log" / "talker.log").read_text() == "hello\nno \N{REPLACEMENT CHARACTER} end\n"


def test_prefixes_are_coloured_on_a_terminal_unless_no_color_is_set(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Console(terminal=True)
    sink = LogSink(tmp_path, terminal)
    sink.write("web", "hello")
    sink.close()
    assert terminal.getvalue().startswith("\x1b[")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Console(terminal=True)
    sink = LogSink(tmp_path, plain)
    sink.write("web", "hello")
    sink.close()
    assert plain.getvalue() == "web          | hello\n"


def test_without_a_console_the_log_files_are_still_written(tmp_path):
    sink = LogSink(tmp_path / "log", None)
    supervisor = Supervisor(tmp_path, sink=sink)
    supervisor.start(shell("quiet", "echo hello", once=True))
    supervisor.close()
    assert (tmp_path / "log" / "quiet.log").read_text() == "hello\n"


def test_a_line_without_end_does_not_fill_the_memory(supervisor, tmp_path):
    supervisor.start(shell("flood", "head -c 1000000 /dev/zero | tr '\\0' x", once=True))
    lines = (tmp_path / "log" / "flood.log").read_text().splitlines()
    assert sum(map(len, lines)) == 1_000_000
    assert max(map(len, lines)) < 200_000


# --- the supervisor's own death -------------------------------------------------------------------------

_DOOMED = """
    import os, sys
    from pathlib import Path
    from apex.local.logs import LogSink
    from apex.local.supervisor import Spec, Supervisor
    var = Path(sys.argv[1])
    supervisor = Supervisor(var, sink=LogSink(var / "log", None))
    environ = {"PATH": os.defpath}
    supervisor.start(Spec("polite", ["sleep", "600"], environ))
    supervisor.start(Spec("stubborn", ["sh", "-c", sys.argv[2]], environ))
    print("started", flush=True)
    sys.stdin.read()
"""


def doomed_supervisor(var: Path, stubborn: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", textwrap.dedent(_DOOMED), str(var), stubborn]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    with process:  # closes the pipes
        process.kill()


def test_children_hear_of_the_supervisors_death_from_the_kernel(tmp_path):
    # `exec`: a child of the shell would be left to the next start, which is the next test.
    process = doomed_supervisor(tmp_path, "exec sleep 600")
    wait_until(lambda: len(marked(tmp_path)) >= 2)
    kill(process)
    wait_until(lambda: marked(tmp_path) == [])


def test_a_new_start_after_kill_9_leaves_no_process_and_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("apex.local.state._GRACE_S", 0.3)
    stubborn = 'trap "" TERM; setsid sleep 600 & while :; do sleep 0.1; done'
    process = doomed_supervisor(tmp_path, stubborn)
    wait_until(lambda: len(marked(tmp_path)) >= 3)
    kill(process)
    assert marked(tmp_path) != []  # this one did not listen to the kernel's signal
    supervisor = Supervisor(tmp_path, sink=LogSink(tmp_path / "log", None))
    try:
        assert marked(tmp_path) == []
        assert supervisor.leftovers
    finally:
        supervisor.close()
    assert not StateFolder(tmp_path).is_locked()
    assert StateFolder(tmp_path).read() == {}


def test_a_stranger_with_a_noted_pid_is_left_alone(tmp_path):
    """The pid of a child of the last run may belong to another program by now."""
    stranger = subprocess.Popen(["sleep", "60"])
    state = StateFolder(tmp_path)
    state.lock().close()
    state.write([("web", stranger.pid)], {})
    note = state.note.read_text().replace(str(psutil.Process(stranger.pid).create_time()), "1000.0")
    state.note.write_text(note)
    Supervisor(tmp_path, sink=LogSink(tmp_path / "log", None)).close()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_note_that_cannot_be_read_does_not_stop_a_start(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stack.json").write_text('{"processes": [')
    Supervisor(tmp_path, sink=LogSink(tmp_path / "log", None)).close()


def test_one_folder_has_one_supervisor(supervisor, tmp_path):
    with pytest.raises(
        AlreadyRunning, match=rf"already runs on {tmp_path} \(pid {os.getpid()}\): stop it, or set"
    ):
        Supervisor(tmp_path, sink=LogSink(tmp_path / "log", None))


def test_an_interrupted_start_can_be_closed(tmp_path):
    supervisor = Supervisor(tmp_path, sink=LogSink(tmp_path / "log", None))
    main = threading.main_thread().ident
    assert main is not None
    begun = threading.Event()

    def ready() -> bool:
        begun.set()
        return False

    def interrupt() -> None:
        begun.wait(20)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        supervisor.start(shell("never", "sleep 600", ready=ready))
    supervisor.close()
    assert marked(tmp_path) == []


# --- replacing ----------------------------------------------------------------------------------------


def test_a_successor_starts_beside_and_the_one_before_ends_by_itself(supervisor, tmp_path):
    ready, leave = tmp_path / "ready", tmp_path / "leave"
    [first] = supervisor.start(shell("door", f"while [ ! -e {leave} ]; do sleep 0.02; done"))
    old_pid = first.pid
    supervisor.replace("door", shell("door", f"touch {ready}; sleep 60", ready=ready.exists))
    assert psutil.pid_exists(old_pid)
    assert supervisor.process("door").pid not in {None, old_pid}
    leave.touch()
    wait_until(lambda: supervisor._processes == [supervisor.process("door")])
    assert first.pid is None
    assert supervisor.process("door").pid is not None
    assert supervisor.failure is None


def test_a_successor_that_fails_changes_nothing(supervisor):
    [first] = supervisor.start(shell("door", "sleep 60"))
    with pytest.raises(ProcessFailed, match="door ended with status 3"):
        supervisor.replace("door", shell("door", "exit 3", ready=lambda: False))
    assert supervisor.process("door") is first
    first.kill()
    wait_until(lambda: first.pid is not None)  # it is still looked after
