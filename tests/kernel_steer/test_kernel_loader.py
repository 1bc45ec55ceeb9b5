"""Compiling, loading, pinning: what stands between an engine and a machine it has not seen before."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from io import StringIO

import pytest
from django.core.management import call_command

from kernel_steer.engine import EngineUnavailable, select_engine
from kernel_steer.engine.base import NodeFlipped, NodeKey
from kernel_steer.engine.kernel import KernelEngine, bpf, pins, selftest
from kernel_steer.engine.kernel import compile as compiling
from kernel_steer.engine.kernel.compile import CannotCompile, get_bytecode
from kernel_steer.engine.kernel.probe import probe
from kernel_steer.engine.kernel.program import Program
from kernel_steer.ports import kernel as ports_kernel
from tests.kernel_steer.kernel_support import needs_kernel_engine
from tests.kernel_steer.stand import NODE, Stand, tcp_pair


@needs_kernel_engine
class TestBytecode:
    def test_it_is_compiled_once(self, tmp_path, monkeypatch):
        first = get_bytecode(tmp_path)
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
        assert get_bytecode(tmp_path) == first
        assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "the compiler left something behind"

    def test_what_others_could_have_written_is_not_loaded(self, tmp_path):
        get_bytecode(tmp_path)
        [cached] = tmp_path.iterdir()
        cached.write_text("{}")
        cached.chmod(0o666)
        assert get_bytecode(tmp_path).programs
        assert cached.stat().st_mode & 0o022 == 0

    def test_a_source_that_does_not_compile_says_where(self, tmp_path, monkeypatch):
        broken = tmp_path / "steer.bpf.c"
        broken.write_text(compiling._SOURCE.read_text() + "\n#error nonsense\n")
        monkeypatch.setattr(compiling, "_SOURCE", broken)
        with pytest.raises(CannotCompile, match="nonsense"):
            get_bytecode(tmp_path / "cache")

    def test_without_bcc_it_says_which_package(self, tmp_path, monkeypatch):
        monkeypatch.setattr(compiling, "_DIST_PACKAGES", str(tmp_path))
        with pytest.raises(CannotCompile, match="apt-get install python3-bpfcc"):
            get_bytecode(tmp_path)

    def test_a_refused_program_says_so_and_leaves_nothing_open(self):
        bytecode = get_bytecode()
        code, _ = bytecode.programs["steer"]
        before = len(os.listdir("/proc/self/fd"))
        bytecode.programs["steer"] = (code, ())  # maps' addresses stay zero
        with pytest.raises(bpf.Refused) as caught:
            Program(bytecode, flows_max=1)
        assert caught.value.log
        assert len(os.listdir("/proc/self/fd")) == before


@needs_kernel_engine
class TestSelftest:
    def test_every_check_passes_here(self):
        checks = selftest.run()
        assert [check.name for check in checks if not check.ok] == []
        assert len(checks) == 2 + len(selftest._QUESTIONS)

    def test_the_command_says_it_in_json(self):
        out = StringIO()
        call_command("steer_selftest", "--json", stdout=out)
        said = json.loads(out.getvalue())
        assert (said["engine"], said["ok"]) == ("kernel", True)
        assert {"name", "ok", "detail"} == set(said["checks"][0])
        assert [check["name"] for check in said["ports"] if check["ok"]] == [
            "ports_load", "ports_node_death", "ports_requests",
        ]  # fmt: skip

    def test_ports_that_the_kernel_cannot_carry_leave_the_engine_alone(self, monkeypatch):
        def refused(*_, **__):
            raise bpf.Refused(13, "the verifier refuses the program")

        monkeypatch.setattr(ports_kernel, "KernelPorts", refused)
        out = StringIO()
        call_command("steer_selftest", "--json", stdout=out)
        said = json.loads(out.getvalue())
        assert (said["engine"], said["ok"]) == ("kernel", True)
        [check] = said["ports"]
        assert (check["name"], check["ok"]) == ("ports_load", False)
        assert "the verifier refuses the program" in check["detail"]

    def test_one_failing_check_means_relay(self, monkeypatch):
        def fails(program):
            raise selftest._Wrong("a FIN breaks the client's socket")

        monkeypatch.setitem(selftest._QUESTIONS, "fin_guard", fails)
        out = StringIO()
        with pytest.raises(SystemExit) as caught:
            call_command("steer_selftest", "--json", stdout=out)
        assert caught.value.code == 1
        assert json.loads(out.getvalue())["engine"] == "relay"
        choice = select_engine("auto")
        assert (choice.engine.name, choice.reason) == (
            "relay",
            "no kernel engine: a FIN breaks the client's socket",
        )
        with pytest.raises(EngineUnavailable, match="breaks the client"):
            select_engine("kernel")

    def test_auto_takes_the_kernel_where_it_may(self):
        choice = select_engine("auto")
        assert (choice.engine.name, choice.reason) == ("kernel", "the self-test passed on this kernel")
        choice.engine.close()
        assert select_engine("relay").engine.name == "relay"


class TestProbe:
    """What is missing is said in words, whichever machine this runs on."""

    def test_another_system(self, monkeypatch):
        monkeypatch.setattr(sys, "platform", "darwin")
        assert "needs Linux" in (probe() or "")

    def test_an_old_kernel(self, monkeypatch):
        found = os.uname()
        monkeypatch.setattr(
            os, "uname", lambda: os.uname_result((found[0], found[1], "5.10.0-8-amd64", found[3], found[4]))
        )
        assert probe() == "it needs Linux 5.15 or newer, this is 5.10.0-8-amd64"

    def test_a_plain_user(self):
        """As another user, in a process of its own: missing rights are named, and auto means relay."""
        if os.getuid() != 0:
            pytest.skip("only root can become another user")
        script = (
            "import os, json\n"
            "from kernel_steer.engine import select_engine\n"
            "from kernel_steer.engine.kernel.probe import probe\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "choice = select_engine('auto')\n"
            "print(json.dumps([probe(), choice.engine.name, choice.reason]))\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        reason, engine, told = json.loads(done.stdout)
        assert "missing: CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF" in reason
        assert engine == "relay"
        assert reason in told


@needs_kernel_engine
class TestRights:
    """In processes of their own, which give up what they do not need."""

    NEEDED = ("bpf", "net_admin", "perfmon")

    def _probe_with(self, rights: tuple[str, ...]) -> dict[str, str]:
        if os.getuid() != 0 or not shutil.which("setpriv"):
            pytest.skip("only root can give up single rights, with setpriv")
        script = (
            "import json\n"
            "from kernel_steer.engine import select_engine\n"
            "choice = select_engine('auto')\n"
            "print(json.dumps({'engine': choice.engine.name, 'reason': choice.reason}))\n"
            "choice.engine.close()\n"
        )
        kept = ",".join(["-all", *(f"+{name}" for name in rights)])
        argv = ["setpriv", f"--bounding-set={kept}", f"--inh-caps={kept}", sys.executable, "-c", script]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    def test_three_are_enough(self):
        assert self._probe_with(self.NEEDED) == {
            "engine": "kernel",
            "reason": "the self-test passed on this kernel",
        }

    @pytest.mark.parametrize("missing", NEEDED)
    def test_each_of_them_is_needed_and_named(self, missing):
        told = self._probe_with(tuple(name for name in self.NEEDED if name != missing))
        assert told["engine"] == "relay"
        assert f"missing: CAP_{missing.upper()}" in told["reason"]


@needs_kernel_engine
class TestPins:
    async def test_another_process_flips(self, tmp_path):
        """With one write to the pinned map, whatever the gateway is doing."""
        engine = KernelEngine(flows_max=4)
        stand = Stand(engine, tmp_path)
        script = (
            "from kernel_steer.engine.base import NodeKey\n"
            "from kernel_steer.engine.kernel.pins import NodeMaps\n"
            "maps = NodeMaps()\n"
            f"maps.refresh({{{engine.pins!r}}})\n"
            f"print(maps.flip(NodeKey({NODE.name!r}, {NODE.epoch})))\n"
        )
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) == 1
        near, far = tcp_pair()
        with pytest.raises(NodeFlipped):
            engine.open_flow(watch=stand.watch, backend=near, node=NODE, slot=stand.slot, gate=lambda data: 0)
        far.close()
        stand.close()
        engine.close()

    def test_a_flip_never_goes_back_to_an_older_incarnation(self):
        engine = KernelEngine(flows_max=1)
        nodes = engine._program.maps["node"]
        assert pins.write_flip(nodes, NodeKey("n", 5))
        assert not pins.write_flip(nodes, NodeKey("n", 5))
        assert not pins.write_flip(nodes, NodeKey("n", 3))
        assert pins.first_live_epoch(nodes, "n") == 6
        assert pins.first_live_epoch(nodes, "other") == 0
        engine.close()

    def test_engines_do_not_disturb_each_other_and_clean_up(self):
        one, two = KernelEngine(flows_max=1), KernelEngine(flows_max=1)
        assert one.owner.folder != two.owner.folder
        one.flip(NodeKey("n", 1))
        assert pins.first_live_epoch(two._program.maps["node"], "n") == 0
        one.close()
        assert not one.owner.folder.exists()
        assert two.owner.folder.exists()
        two.close()
        assert not (pins.LOCKS / f"{two.owner.folder.name}.lock").exists()

    def test_pins_of_a_living_engine_are_left_alone(self):
        engine = KernelEngine(flows_max=1)
        with pins.claim_dead(engine.owner.folder) as claimed:
            assert claimed is None
        select_engine("relay")
        assert engine.owner.folder.exists()
        engine.close()


def test_an_engine_that_cannot_have_its_folder_leaves_no_lock_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(pins, "LOCKS", tmp_path / "locks")
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(pins, "ROOT", in_the_way)
    with pytest.raises(pins.PinsUnavailable, match="cannot be made"):
        pins.Owner()
    assert list((tmp_path / "locks").iterdir()) == []
