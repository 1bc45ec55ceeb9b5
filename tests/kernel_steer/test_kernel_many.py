"""Ten thousand answers at a time: one write flips them all, and no byte of any is lost."""

from __future__ import annotations

import asyncio
import resource

import pytest

from kernel_steer.engine.base import LegEnded, NodeKey
from kernel_steer.engine.kernel import KernelEngine
from kernel_steer.engine.kernel.flow import KernelFlow
from kernel_steer.engine.wake import ClientWatch
from kernel_steer.journal import Journal
from tests.kernel_steer.kernel_support import event, needs_kernel_engine, passed, redirected, until
from tests.kernel_steer.many_ends import Ends, files_allowed

pytestmark = needs_kernel_engine
NODE = NodeKey("a", 1)
_WANTED = 10_000
_FILES_BESIDE = 400


@pytest.fixture
def flows_max():
    """As many as wanted, or as this system lets one process have: each needs two open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield min(_WANTED, (files_allowed() - _FILES_BESIDE) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _pump(flow: KernelFlow) -> None:
    try:
        while True:
            await flow.next(60)
    except LegEnded:
        pass


async def test_one_write_flips_ten_thousand_flows(tmp_path, flows_max):
    engine = KernelEngine(flows_max=flows_max)
    journal = Journal(tmp_path / "journal", slots=flows_max)
    ends = Ends(flows_max)
    first, second, third = event(1), event(2), event(3)
    flows, watches, pumping = [], [], []
    for _ in range(flows_max):
        ours, backend = ends.accept()
        watches.append(ClientWatch(ours))
        slot = journal.open()
        flow = engine.open_flow(
            watch=watches[-1],
            backend=backend,
            node=NODE,
            slot=slot,
            gate=lambda data, slot=slot: slot.delivered + len(data),
            already_read=first,
        )
        assert type(flow) is KernelFlow, "it is relayed"
        flows.append(flow)
        pumping.append(asyncio.ensure_future(_pump(flow)))
    await until(lambda: all(flow._sleeper is not None for flow in flows), timeout_s=60)
    await asyncio.to_thread(ends.send, second)
    assert {redirected(flow) for flow in flows} == {len(second)}

    assert engine.flip(NODE) == flows_max
    await asyncio.to_thread(ends.send, third)
    whole = first + second + third
    assert await asyncio.to_thread(ends.received, len(whole)) == {whole}
    assert {(redirected(flow), passed(flow)) for flow in flows} == {(len(second), len(third))}
    await until(lambda: {flow.delivered for flow in flows} == {len(whole)}, timeout_s=60)

    for task in pumping:
        task.cancel()
    await asyncio.gather(*pumping, return_exceptions=True)
    for flow, watch in zip(flows, watches, strict=True):
        assert flow.fence() == len(whole)
        watch.stop()
        watch.client.close()
    assert engine.stats.flows_open == 0
    engine.close()
    journal.close()
    ends.close()
