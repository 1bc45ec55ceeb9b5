"""Steered ports in the back office."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from brokerage.models import SteeredPort
from brokerage.services.ports import open_port
from tests.brokerage import factories
from tests.brokerage.test_admin import act, office, text, url

__all__ = ["office"]
pytestmark = pytest.mark.django_db


def _form(**changes: object) -> dict[str, object]:
    asked = {
        "customer": factories.make_customer().pk,
        "name": "inference",
        "number": 21000,
        "mode": "http",
        "served_model": factories.make_model().pk,
        "primary": "",
        "standby": "",
        "idle_ms": 200,
        "connections_max": 1024,
    }
    return asked | changes


def _ready(name: str):
    return factories.make_node(name, state="ready", epoch=7, host="127.0.0.1", port=9001)


def test_open_retarget_close(office):
    a, b, c = _ready("a"), _ready("b"), _ready("c")
    office.post(url("steeredport", "add"), _form())
    port = SteeredPort.objects.get()
    assert (port.primary, port.standby) == (a, b)
    office.post(url("steeredport", "change", port.pk), {"primary": c.pk, "standby": a.pk})
    port.refresh_from_db()
    assert (port.primary, port.standby) == (c, a)
    assert "1 closed." in act(office, "steeredport", "close", port.pk)
    assert {"steered_port.opened", "steered_port.retargeted", "steered_port.closed"} <= set(
        factories.audit_actions()
    )
    assert "the pool's best" not in text(office.get(url("steeredport", "change", port.pk)))


def test_errors_stand_beside_their_field(office):
    a = _ready("a")
    page = text(office.post(url("steeredport", "add"), _form(number=80, primary=a.pk, standby=a.pk)))
    assert "Take a port from 21000 to 21999 (APEX_STEERED_PORTS)." in page or "another node" in page
    page = text(office.post(url("steeredport", "add"), _form(number=80)))
    assert "Take a port from 21000 to 21999 (APEX_STEERED_PORTS)." in page
    assert not SteeredPort.objects.exists()


def test_a_taken_number_is_an_error_and_no_failure(office):
    form = _form()
    office.post(url("steeredport", "add"), form)
    page = text(office.post(url("steeredport", "add"), form))
    assert "Another open port has this number." in page
    assert SteeredPort.objects.count() == 1


def test_the_list_costs_the_same_however_long_it_is(office):
    assert "No steered port yet" in text(office.get(url("steeredport")))
    customer, model = factories.make_customer(), factories.make_model()
    _ready("a"), _ready("b")
    counts = []
    for number in range(21000, 21006):
        open_port(customer=customer, name=str(number), number=number, served_model=model, actor="test")
        with CaptureQueriesContext(
            connection,
        ) as queries:
            office.get(url("steeredport"))
        counts.append(len(queries))
    assert counts[0] == counts[-1]
