"""Steered ports: who may have which, and how they follow the fleet."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from brokerage.models import Node, SteeredPort
from brokerage.services.evictions import book_eviction
from brokerage.services.nodes import Heartbeat, mark_draining, record_heartbeat, sweep_lost_nodes
from brokerage.services.ports import close_port, open_port, retarget_port
from kernel_steer.engine.base import NodeKey
from kernel_steer.ports import Backend, Endpoint, Mode
from tests.brokerage.broker import World, eventually, orm
from tests.brokerage.factories import TOKENIZER, audit_actions, make_customer, make_model, make_node

NOW = datetime(2026, 12, 1, 10, 0, tzinfo=UTC)


def ready(name: str, **fields: Any) -> Node:
    return make_node(name, state="ready", epoch=7, host="127.0.0.1", port=9001, **fields)


def opened(**changes: Any) -> SteeredPort:
    asked: dict[str, Any] = {
        "customer": changes.pop("customer", None) or make_customer(),
        "name": "inference",
        "number": 21000,
        "served_model": make_model(),
        "actor": "test",
    }
    return open_port(**(asked | changes))


def nodes_of(port: SteeredPort) -> tuple[str | None, str | None]:
    port.refresh_from_db()
    return port.primary and port.primary.name, port.standby and port.standby.name


@pytest.mark.django_db
class TestOpening:
    def test_nodes_are_chosen_from_the_pool(self):
        for name in ("c", "a", "b"):
            ready(name)
        make_node("not-ready")
        Node.objects.filter(name="a").update(drained_epoch=7)
        assert nodes_of(opened()) == ("b", "c")
        assert audit_actions()[-1] == "steered_port.opened"

    def test_nodes_with_fewer_ports_come_first(self):
        for name in ("a", "b", "c", "d"):
            ready(name)
        customer = make_customer()
        assert nodes_of(opened(customer=customer)) == ("a", "b")
        assert nodes_of(opened(customer=customer, name="second", number=21001)) == ("c", "d")

    def test_without_a_ready_node_it_waits_for_one(self):
        port = opened()
        assert nodes_of(port) == (None, None)
        for name in ("a", "b"):
            make_node(name)
            record_heartbeat(heartbeat=Heartbeat(name, 8, "127.0.0.1", 9001, "gemma", TOKENIZER, 4, True))
        assert nodes_of(port) == ("a", "b")

    @pytest.mark.parametrize(
        ("changes", "field", "says"),
        [
            ({"number": 80}, "number", "21000 to 21999"),
            ({"number": 22000}, "number", "APEX_STEERED_PORTS"),
            ({"name": " "}, "name", "blank"),
            ({"idle_ms": 0}, "idle_ms", "1"),
            ({"connections_max": 10_001}, "connections_max", "10000"),
            ({"mode": "udp"}, "mode", "udp"),
        ],
    )
    def test_what_cannot_be_is_said_beside_its_field(self, changes, field, says):
        with pytest.raises(ValidationError) as refused:
            opened(**changes)
        assert says in str(refused.value.message_dict[field])
        assert not SteeredPort.objects.exists()

    def test_nodes_have_to_be_two_of_the_pool(self):
        a = ready("a")
        stranger = Node.objects.create(name="x", served_model=make_model("other"))
        with pytest.raises(ValidationError, match="not in the pool"):
            opened(primary=stranger)
        with pytest.raises(ValidationError, match="another node"):
            opened(primary=a, standby=a)

    def test_a_number_and_a_name_are_open_once(self):
        customer = make_customer()
        first = opened(customer=customer)
        with pytest.raises(ValidationError, match="has this number"):
            opened(customer=make_customer(name="other"))
        with pytest.raises(ValidationError, match="of this name"):
            opened(customer=customer, number=21001)
        assert close_port(port=first, actor="test")
        assert not close_port(port=first, actor="test")
        opened(customer=customer)

    def test_the_database_keeps_it_too(self):
        a = ready("a")
        port = opened(primary=a)
        for wrong in (
            {"number": 0},
            {"standby": a},
            {"primary": None, "standby": a},
            {"mode": "udp"},
            {"state": "ajar"},
            {"idle_ms": 0},
        ):
            with pytest.raises(IntegrityError), transaction.atomic():
                SteeredPort.objects.filter(pk=port.pk).update(**wrong)


@pytest.mark.django_db
class TestMoving:
    def test_an_eviction_makes_the_standby_the_primary(self):
        for name in ("a", "b", "c"):
            ready(name)
        port = opened()
        assert nodes_of(port) == ("a", "b")
        for _ in range(2):
            book_eviction(node="a", epoch=7, action="terminate", source="aws", signal_at=NOW, deadline=None)
        assert nodes_of(port) == ("b", "c")
        assert audit_actions().count("steered_port.retargeted") == 1

    def test_a_standby_that_leaves_is_replaced(self):
        a, b, _ = ready("a"), ready("b"), ready("c")
        port = opened(primary=a, standby=b)
        mark_draining(node=b, epoch=7, reason="drained by clerk")
        assert nodes_of(port) == ("a", "c")

    def test_the_last_node_stays_until_another_is_ready(self):
        a = ready("a")
        port = opened()
        mark_draining(node=a, epoch=7, reason="aws: terminate")
        assert nodes_of(port) == ("a", None)
        make_node("b")
        record_heartbeat(heartbeat=Heartbeat("b", 8, "127.0.0.1", 9001, "gemma", TOKENIZER, 4, True))
        assert nodes_of(port) == ("a", "b")

    def test_an_old_incarnation_s_notice_changes_nothing(self):
        a, _ = ready("a"), ready("b")
        port = opened()
        mark_draining(node=a, epoch=6, reason="aws: terminate")
        assert nodes_of(port) == ("a", "b")

    def test_a_silent_node_is_left(self):
        ready("a", last_seen_at=NOW.replace(year=2020)), ready("b")
        port = opened()
        assert sweep_lost_nodes() == 1
        assert nodes_of(port) == ("b", None)

    def test_staff_choose_other_nodes(self):
        a, b, c = ready("a"), ready("b"), ready("c")
        port = opened(primary=a, standby=b)
        assert retarget_port(port=port, primary=c, standby=None, actor="test")
        assert nodes_of(port)[0] == "c"
        assert not retarget_port(port=port, primary=c, standby=port.standby, actor="test")
        close_port(port=port, actor="test")
        with pytest.raises(ValidationError, match="closed"):
            retarget_port(port=port, primary=a, standby=b, actor="test")


class TestGateway:
    async def test_it_follows_within_a_second(self, world: World, admission):
        assert admission.endpoints() == ()
        port = await orm(lambda: opened(customer=world.customer, mode=Mode.TCP, idle_ms=50))
        a = Backend(NodeKey("node-a", 7), "127.0.0.1", 9001)

        async def now(*wanted: Endpoint) -> None:
            async def they_are() -> bool:
                return admission.endpoints() == wanted

            await eventually(they_are)

        await now(Endpoint(str(port.pk), 21000, Mode.TCP, a, None, 50, 1024))
        await orm(lambda: world.node.__class__.objects.filter(pk=world.node.pk).update(host=""))
        await now(Endpoint(str(port.pk), 21000, Mode.TCP, None, None, 50, 1024))
        await orm(lambda: world.customer.__class__.objects.update(suspended_at=NOW))
        await now()
        await orm(lambda: world.customer.__class__.objects.update(suspended_at=None))
        await orm(lambda: close_port(port=port, actor="test"))
        await now()
