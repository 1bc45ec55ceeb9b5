"""The loopback PayPal itself: pages, error shapes, memory, webhooks."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests
from djmoney.money import Money

from ledger.paypal.client import PayPalOrders
from ledger.paypal.disputes import read_dispute
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable, Order, Return
from tests.ledger.paypal_stub import running_stub


def place(request_id: str = "create-1") -> Order:
    return PayPalOrders().create_order(
        amount=Money("10.00", "USD"), reference="ours", request_id=request_id,
        return_url="https://shop.example/back?a=1", cancel_url="https://shop.example/no",
    )  # fmt: skip


def test_a_person_approves_on_the_page_and_is_sent_back(paypal):
    order = place()
    page = requests.get(order.approve_url, timeout=5)
    assert "10.00 USD" in page.text
    answer = requests.post(order.approve_url, data={"decision": "approve"}, allow_redirects=False, timeout=5)
    assert answer.status_code == 303
    assert answer.headers["Location"].startswith(
        f"https://shop.example/back?a=1&token={order.order_id}&PayerID="
    )
    assert PayPalOrders().read_order(order.order_id).status == "approved"
    assert "decided already" in requests.get(order.approve_url, timeout=5).text


def test_a_person_cancels(paypal):
    order = place()
    answer = requests.post(order.approve_url, data={"decision": "cancel"}, allow_redirects=False, timeout=5)
    assert answer.headers["Location"] == f"https://shop.example/no?token={order.order_id}"
    assert PayPalOrders().read_order(order.order_id).status == "open"


def test_unknown_orders_and_bad_tokens_are_refused(paypal):
    assert requests.get(f"{paypal.url}/checkoutnow?token=NONE", timeout=5).status_code == 404
    assert requests.get(f"{paypal.url}/v2/checkout/orders/NONE", timeout=5).json()["error"] == "invalid_token"
    answer = requests.get(f"{paypal.url}/v2/checkout/orders/NONE", headers=paypal.token(), timeout=5)
    assert (answer.status_code, answer.json()["details"][0]["issue"]) == (404, "INVALID_RESOURCE_ID")


@pytest.mark.parametrize(
    ("change", "status", "issue"),
    [
        ({"intent": "AUTHORIZE"}, 422, "UNSUPPORTED_INTENT"),
        ({"purchase_units": []}, 400, "INVALID_ARRAY_MIN_ITEMS"),
        (
            {"purchase_units": [{"amount": {"currency_code": "USD", "value": 10}}]},
            400,
            "INVALID_PARAMETER_SYNTAX",
        ),
        (
            {"purchase_units": [{"amount": {"currency_code": "USD", "value": "1.001"}}]},
            422,
            "DECIMAL_PRECISION",
        ),
        (
            {"purchase_units": [{"amount": {"currency_code": "XXX", "value": "1.00"}}]},
            422,
            "CURRENCY_NOT_SUPPORTED",
        ),
        (
            {"purchase_units": [{"amount": {"currency_code": "USD", "value": "0.00"}}]},
            422,
            "CANNOT_BE_ZERO_OR_NEGATIVE",
        ),
    ],
)
def test_errors_have_paypals_shape(paypal, change, status, issue):
    body = {
        "intent": "CAPTURE",
        "purchase_units": [{"amount": {"currency_code": "USD", "value": "10.00"}}],
    } | change
    answer = requests.post(f"{paypal.url}/v2/checkout/orders", json=body, headers=paypal.token(), timeout=5)
    assert (answer.status_code, answer.json()["details"][0]["issue"]) == (status, issue)
    assert {"name", "message", "debug_id"} <= answer.json().keys()


def test_the_short_answer_is_the_default(paypal):
    body = {"intent": "CAPTURE", "purchase_units": [{"amount": {"currency_code": "USD", "value": "10.00"}}]}
    answer = requests.post(f"{paypal.url}/v2/checkout/orders", json=body, headers=paypal.token(), timeout=5)
    assert answer.json().keys() == {"id", "status", "links"}


def test_orders_and_request_ids_outlive_a_restart(tmp_path, settings):
    with running_stub(tmp_path) as stub:
        settings.PAYPAL_STUB_URL = stub.url
        order = place()
        stub.approve(order.order_id)
        taken = PayPalOrders().capture_order(order.order_id, request_id="capture-1")
    with running_stub(tmp_path) as stub:
        settings.PAYPAL_STUB_URL = stub.url
        assert PayPalOrders().capture_order(order.order_id, request_id="capture-1") == taken
        assert PayPalOrders().read_order(order.order_id).captures == taken.captures
        assert place().order_id == order.order_id


def test_an_unknown_fault_is_refused_with_the_known_ones(paypal):
    answer = requests.post(f"{paypal.url}/control/faults", json={"operation": "x", "kind": "y"}, timeout=5)
    assert answer.status_code == 400
    assert "lost" in answer.text


@pytest.fixture
def listener() -> Iterator[tuple[str, queue.Queue[bytes]]]:
    """A merchant's webhook address that fails the first time."""
    received: queue.Queue[bytes] = queue.Queue()
    statuses = iter([500])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(next(statuses, 200))
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_webhooks_are_repeated_until_taken_and_doubled_on_demand(paypal, listener):
    url, received = listener
    requests.put(f"{paypal.url}/control/webhook", json={"url": url}, timeout=5)
    requests.post(f"{paypal.url}/control/faults", json={"webhook_copies": 2}, timeout=5)
    paypal.approve(place().order_id)
    bodies = [received.get(timeout=10) for _ in range(3)]  # two copies, one of them refused at first
    assert len(set(bodies)) == 1
    assert b"CHECKOUT.ORDER.APPROVED" in bodies[0]


def test_it_runs_without_django(tmp_path):
    code = "import sys, ledger.paypal.stub.__main__; sys.exit('django' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def capture_id(paypal) -> str:
    order = place()
    paypal.approve(order.order_id)
    [capture] = PayPalOrders().capture_order(order.order_id, request_id="capture").captures
    return capture.external_id


def refund(paypal, capture: str, value: str, request_id: str = "r", currency: str = "USD") -> Return:
    return PayPalOrders().refund_capture(
        capture, amount=Money(value, currency), reference="ours", request_id=request_id, note="Sorry"
    )


def test_refunds_speak_the_sdks_language(paypal):
    capture = capture_id(paypal)
    paypal.set(fee_back="0.10")
    sent = refund(paypal, capture, "4.00")
    assert (sent.capture_id, sent.kind, sent.status, sent.reference) == (
        capture,
        "refund",
        "completed",
        "ours",
    )
    assert (str(sent.gross), str(sent.fee)) == ("4.00", "0.10")
    assert refund(paypal, capture, "4.00") == sent  # the same request id
    assert PayPalOrders().read_return(sent.external_id) == sent
    [order_id] = paypal.orders
    assert PayPalOrders().read_order(order_id).refund_ids == [sent.external_id]


@pytest.mark.parametrize(
    ("value", "currency", "before", "issue"),
    [
        ("10.01", "USD", "", "REFUND_AMOUNT_EXCEEDED"),
        ("1.00", "USD", "10.00", "CAPTURE_FULLY_REFUNDED"),
        ("1.00", "EUR", "", "CURRENCY_MISMATCH"),
    ],
)
def test_refunds_that_cannot_be_are_refused_in_paypals_words(paypal, value, currency, before, issue):
    capture = capture_id(paypal)
    if before:
        refund(paypal, capture, before, "before")
    with pytest.raises(GatewayRefused) as caught:
        refund(paypal, capture, value, currency=currency)
    assert caught.value.issue == issue


def test_a_call_whose_twin_is_under_way_is_no_refusal(paypal):
    capture = capture_id(paypal)
    paypal.break_("refund", "busy")
    with pytest.raises(GatewayUnavailable, match="409"):
        refund(paypal, capture, "1.00")


def test_disputes_and_unknown_things(paypal):
    dispute = paypal.dispute(capture_id(paypal), "8.00")
    told = read_dispute(dispute)
    assert (told.state, told.currency, str(told.amount)) == ("open", "USD", "8.00")
    paypal.resolve(dispute, "RESOLVED_BUYER_FAVOUR")
    assert read_dispute(dispute).state == "lost"
    for unknown in (lambda: read_dispute("NONE"), lambda: PayPalOrders().read_return("NONE")):
        with pytest.raises(GatewayRefused) as caught:
            unknown()
        assert caught.value.issue == "INVALID_RESOURCE_ID"


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("RESOLVED_WITH_PAYOUT", "won"),
        ("CANCELED_BY_BUYER", "won"),
        ("ACCEPTED", "lost"),
        ("SOMETHING_NEW", "lost"),
    ],
)
def test_every_end_of_a_dispute_is_won_or_lost(paypal, outcome, state):
    dispute = paypal.dispute(capture_id(paypal))
    paypal.resolve(dispute, outcome)
    assert read_dispute(dispute).state == state


def test_what_happened_after_the_sale_outlives_a_restart_too(tmp_path, settings):
    with running_stub(tmp_path) as stub:
        settings.PAYPAL_STUB_URL = stub.url
        capture = capture_id(stub)
        sent = refund(stub, capture, "4.00")
        dispute = stub.dispute(capture)
        body = stub.notification(txn_id="T")
        assert (tmp_path / "ca.pem").read_bytes().startswith(b"-----BEGIN CERTIFICATE")
    with running_stub(tmp_path) as stub:
        settings.PAYPAL_STUB_URL = stub.url
        assert PayPalOrders().read_return(sent.external_id) == sent
        assert read_dispute(dispute).capture_id == capture
        assert len(stub.store.movements) == 2
        answer = requests.post(f"{stub.url}/cgi-bin/webscr", data=b"cmd=_notify-validate&" + body, timeout=5)
        assert answer.text == "VERIFIED"
        answer = requests.post(f"{stub.url}/cgi-bin/webscr", data=b"cmd=_notify-validate&x" + body, timeout=5)
        assert answer.text == "INVALID"


def test_webhooks_can_be_held_and_sent_in_another_order(paypal, listener):
    url, received = listener
    requests.put(f"{paypal.url}/control/webhook", json={"url": url, "held": True}, timeout=5)
    order = place()
    paypal.approve(order.order_id)
    PayPalOrders().capture_order(order.order_id, request_id="capture")
    assert received.empty()
    answer = requests.post(f"{paypal.url}/control/webhook/release?order=reversed", timeout=5)
    assert answer.json() == {"sent": 2}
    bodies = [received.get(timeout=10) for _ in range(3)]  # one of them is refused at first
    kinds = {json.loads(body)["event_type"] for body in bodies}
    assert kinds == {"PAYMENT.CAPTURE.COMPLETED", "CHECKOUT.ORDER.APPROVED"}


def test_a_button_that_is_none_does_not_work(paypal):
    assert requests.get(f"{paypal.url}/cgi-bin/webscr?cmd=_cart", timeout=5).status_code == 400
