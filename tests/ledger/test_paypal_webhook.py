"""POST /v1/webhooks/paypal: stored as it came, and only a reason to look."""

from __future__ import annotations

import json

import pytest
from django.test import RequestFactory

from ledger.models import InboundEvent
from ledger.paypal.events import order_id_of
from ledger.paypal.views import MAX_BODY_BYTES, paypal_webhook
from ledger.selectors import wallet
from tests.ledger.conftest import make_wallet
from tests.ledger.test_paypal import assert_credited_once, buy

pytestmark = pytest.mark.django_db


def deliver(raw: bytes, **headers: str):
    request = RequestFactory().post(
        "/v1/webhooks/paypal", raw, content_type="application/json", headers=headers
    )
    return paypal_webhook(request)


def event_about(order_id: str | None, kind: str = "CHECKOUT.ORDER.APPROVED") -> bytes:
    return json.dumps({"id": "WH-1", "event_type": kind, "resource": {"id": order_id}}).encode()


def test_a_webhook_has_the_order_looked_at(paypal, eager_tasks, django_capture_on_commit_callbacks):
    team = make_wallet()
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    for _ in range(3):
        with django_capture_on_commit_callbacks(execute=True):
            assert deliver(event_about(top_up.order_id), **{"Paypal-Transmission-Id": "t"}).status_code == 200
    assert_credited_once(team, paypal)
    event = InboundEvent.objects.get()
    assert (bytes(event.raw), event.headers["paypal-transmission-id"]) == (event_about(top_up.order_id), "t")
    assert event.applied_at is not None


def test_a_forged_webhook_credits_nothing(paypal, eager_tasks, django_capture_on_commit_callbacks):
    team = make_wallet()
    top_up = buy(team)
    forged = json.dumps(
        {
            "event_type": "PAYMENT.CAPTURE.COMPLETED",
            "resource": {
                "id": "FAKE", "status": "COMPLETED", "amount": {"currency_code": "USD", "value": "1000000.00"},
                "supplementary_data": {"related_ids": {"order_id": top_up.order_id}},
            },
        }
    ).encode()  # fmt: skip
    with django_capture_on_commit_callbacks(execute=True):
        assert deliver(forged).status_code == 200
    assert wallet(team.code).posted == 0
    assert InboundEvent.objects.count() == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no json",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"event_type": 7, "resource": []}',
        event_about("unknown"),
    ],
)
def test_the_unknown_is_stored_and_answered(raw):
    assert deliver(raw).status_code == 200
    assert bytes(InboundEvent.objects.get().raw) == raw


def test_only_posts_of_a_sensible_size_are_taken():
    assert paypal_webhook(RequestFactory().get("/v1/webhooks/paypal")).status_code == 405
    assert deliver(b"x" * (MAX_BODY_BYTES + 1)).status_code == 413
    assert not InboundEvent.objects.exists()


def test_the_order_is_found_in_every_kind_of_event():
    assert order_id_of(event_about("A")) == "A"
    capture = {"resource": {"id": "C", "supplementary_data": {"related_ids": {"order_id": "B"}}}}
    assert order_id_of(json.dumps(capture | {"event_type": "PAYMENT.CAPTURE.PENDING"}).encode()) == "B"
    assert order_id_of(event_about("C", kind="CUSTOMER.DISPUTE.CREATED")) == ""
