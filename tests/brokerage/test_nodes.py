"""Node states: heartbeats, drains and sweeps in any order."""

import itertools
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db.models.functions import Now

from brokerage import tasks
from brokerage.models import Node
from brokerage.services.nodes import Heartbeat, UnknownNode, mark_draining, record_heartbeat, sweep_lost_nodes
from tests.brokerage.factories import TOKENIZER, audit_actions, make_node

pytestmark = pytest.mark.django_db

BEAT = Heartbeat(
    name="node-a",
    epoch=1_000,
    host="127.0.0.1",
    port=9001,
    model="gemma",
    tokenizer_id=TOKENIZER,
    slots=4,
    healthy=True,
)


def beat(**changes) -> Node:
    record_heartbeat(heartbeat=replace(BEAT, **changes))
    return Node.objects.get(name=BEAT.name)


def test_it_works():
    make_node("node-a")
    node = beat()
    assert (node.state, node.epoch, node.host, node.port, node.slots) == (
        "ready",
        1_000,
        "127.0.0.1",
        9001,
        4,
    )
    assert node.last_seen_at is not None
    assert node.served_model.tokenizer_id == TOKENIZER


def test_only_changes_are_audited():
    make_node("node-a")
    changed = [record_heartbeat(heartbeat=BEAT) for _ in range(3)]
    assert changed == [True, False, False]
    assert audit_actions().count("node.reported") == 1


def test_unknown_nodes_are_not_let_in():
    with pytest.raises(UnknownNode, match="node-a"):
        record_heartbeat(heartbeat=BEAT)


def test_task_drops_unknown_nodes_with_a_line_in_the_log(caplog):
    tasks.record_heartbeat("nobody", 1, "127.0.0.1", 9001, "gemma", TOKENIZER, 4, True)
    assert "nobody" in caplog.text
    assert not Node.objects.exists()


def test_an_older_incarnation_is_ignored():
    make_node("node-a")
    beat(epoch=2_000, port=9002)
    node = beat(epoch=1_000, port=9001)
    assert (node.epoch, node.port) == (2_000, 9002)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer_id": "b" * 64}, "tokenizer"),
        ({"tokenizer_id": ""}, "names no tokenizer"),
        ({"model": "llama"}, "serves 'llama'"),
    ],
)
def test_a_node_that_could_not_continue_answers_is_refused_visibly(change, reason):
    make_node("node-b")
    make_node("node-a")
    record_heartbeat(heartbeat=replace(BEAT, name="node-b"))
    node = beat(**change)
    assert node.state == "expected"
    assert reason in node.state_reason
    assert node.served_model.tokenizer_id == TOKENIZER
    assert beat(epoch=1_001).state == "ready"


def test_a_node_that_starts_is_expected_until_its_server_answers():
    make_node("node-a")
    node = beat(healthy=False, tokenizer_id="")
    assert (node.state, node.epoch) == ("expected", 1_000)
    assert "starting" in node.state_reason
    assert beat().state == "ready"


def test_an_unhealthy_node_gets_no_work_until_it_is_healthy():
    make_node("node-a")
    assert beat().state == "ready"
    assert beat(healthy=False).state == "gone"
    node = beat()
    assert (node.state, node.state_reason) == ("ready", "")


def test_a_drained_incarnation_stays_drained_and_a_restart_is_ready():
    node = make_node("node-a")
    beat()
    assert mark_draining(node=node, epoch=1_000, reason="aws: terminate")
    assert not mark_draining(node=node, epoch=1_000, reason="aws: terminate")
    drained = beat()
    assert (drained.state, drained.state_reason) == ("draining", "aws: terminate")
    restarted = beat(epoch=1_001)
    assert (restarted.state, restarted.state_reason) == ("ready", "")
    mark_draining(node=node, epoch=1_000, reason="late")
    assert beat(epoch=1_001).state == "ready"


def test_every_order_of_the_same_reports_ends_the_same():
    """Two heartbeats of epoch 1, its notice, and a heartbeat of epoch 2 in all 24 orders."""
    steps = [
        lambda node: record_heartbeat(heartbeat=replace(BEAT, epoch=1)),
        lambda node: record_heartbeat(heartbeat=replace(BEAT, epoch=1)),
        lambda node: mark_draining(node=node, epoch=1, reason="aws: terminate"),
        lambda node: record_heartbeat(heartbeat=replace(BEAT, epoch=2)),
    ]
    for order in itertools.permutations(steps):
        Node.objects.all().delete()
        node = make_node("node-a")
        for step in order:
            step(node)
        node.refresh_from_db()
        assert (node.state, node.epoch, node.drained_epoch) == ("ready", 2, 1)


def test_silent_nodes_are_gone_and_come_back():
    make_node("node-a")
    beat()
    assert sweep_lost_nodes() == 0
    Node.objects.update(last_seen_at=Now() - timedelta(seconds=16))
    assert sweep_lost_nodes() == 1
    node = Node.objects.get()
    assert (node.state, node.state_reason) == ("gone", "no heartbeat for 15 s")
    assert sweep_lost_nodes() == 0
    assert beat().state == "ready"


def test_a_drained_node_that_was_lost_does_not_come_back_ready():
    node = make_node("node-a")
    beat()
    mark_draining(node=node, epoch=1_000, reason="aws: terminate")
    Node.objects.update(last_seen_at=Now() - timedelta(seconds=16))
    sweep_lost_nodes()
    assert beat().state == "draining"


def test_a_node_that_was_never_heard_of_is_not_lost():
    make_node("node-a")
    assert sweep_lost_nodes() == 0
    assert Node.objects.get().state == "expected"


# --- who may join a pool ---------------------------------------------------------------------------------

IDENTITY = {
    "engine": "vllm 0.32.0",
    "revision": "r" * 40,
    "template_id": "c" * 64,
    "capabilities": ("ids", "logprobs", "tools"),
}


def test_the_first_node_decides_what_its_pool_is():
    make_node("node-a")
    pool = beat(**IDENTITY).served_model
    assert (pool.revision, pool.template_id) == ("r" * 40, "c" * 64)
    assert pool.capabilities == ["ids", "logprobs", "tools"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"revision": "s" * 40}, "its model revision ssssssssssss… is not the pool's rrrrrrrrrrrr…"),
        ({"template_id": "d" * 64}, "its chat template dddddddddddd… is not the pool's cccccccccccc…"),
        ({"capabilities": ("ids",)}, "its engine lacks what this pool promises: logprobs, tools"),
        ({"tokenizer_id": "", "trouble": "no tokenizer.json"}, "no tokenizer.json"),
    ],
)
def test_a_node_that_could_not_continue_an_answer_of_the_pool_is_refused(changes, reason):
    make_node("node-a")
    beat(**IDENTITY)
    make_node("node-b")
    record_heartbeat(heartbeat=replace(BEAT, name="node-b", **(IDENTITY | changes)))
    other = Node.objects.get(name="node-b")
    assert (other.state, other.state_reason) == ("expected", f"refused: {reason}")


def test_a_node_that_can_do_more_is_welcome_and_promises_nothing_for_the_others():
    make_node("node-a")
    beat(**IDENTITY)
    make_node("node-b")
    more = replace(
        BEAT, name="node-b", **(IDENTITY | {"capabilities": ("guided", *IDENTITY["capabilities"])})
    )
    record_heartbeat(heartbeat=more)
    other = Node.objects.get(name="node-b")
    assert other.state == "ready"
    assert other.served_model.capabilities == ["ids", "logprobs", "tools"]


def test_that_a_model_reasons_is_no_promise_that_others_must_keep():
    """Whether an engine shows it depends on its version, and nodes are brought up to date one by one."""
    make_node("node-a")
    beat(**(IDENTITY | {"capabilities": ("reasoning", *IDENTITY["capabilities"])}))
    make_node("node-b")
    record_heartbeat(heartbeat=replace(BEAT, name="node-b", **IDENTITY))
    assert Node.objects.get(name="node-b").state == "ready"


def test_a_pool_that_staff_made_forget_goes_to_the_next_revision():
    make_node("node-a")
    pool = beat(**IDENTITY).served_model
    pool.revision = ""
    pool.save(update_fields=["revision"])
    node = beat(**(IDENTITY | {"revision": "s" * 40}), epoch=2_000)
    assert (node.state, node.served_model.revision) == ("ready", "s" * 40)


@pytest.mark.parametrize("way", ["text", "none"])
def test_a_server_without_ids_may_join_a_pool_of_its_kind_only(way):
    make_node("node-a")
    make_node("node-b")
    plain = beat(tokenizer_id="", capabilities=(way,))
    assert (plain.state, plain.served_model.capabilities) == ("ready", [way])
    record_heartbeat(heartbeat=replace(BEAT, name="node-b", **IDENTITY))
    other = Node.objects.get(name="node-b")
    assert (other.state, other.state_reason) == (
        "expected",
        f"refused: its engine lacks what this pool promises: {way}",
    )
