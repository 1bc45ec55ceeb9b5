"""POST /v1/webhooks/paypal: what PayPal did not sign is refused, what it signed is stored and looked up."""

from __future__ import annotations

import json
import queue
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from django.test import RequestFactory

from ledger.models import AuditEvent, InboundEvent
from ledger.paypal import certificates
from ledger.paypal.certificates import CertificateRefused, check_address
from ledger.paypal.stub.signing import make_authority, make_certificate, signer
from ledger.paypal.subjects import About, subject_of
from ledger.paypal.throttle import Throttle
from ledger.paypal.views import MAX_BODY_BYTES, paypal_webhook
from ledger.selectors import wallet
from tests.ledger.conftest import make_wallet
from tests.ledger.test_paypal import assert_credited_once, buy

pytestmark = pytest.mark.django_db


def deliver(raw: bytes, headers: dict[str, str]):
    request = RequestFactory().post(
        "/v1/webhooks/paypal", raw, content_type="application/json", headers=headers
    )
    return paypal_webhook(request)


def event_about(order_id: str | None, kind: str = "CHECKOUT.ORDER.APPROVED") -> bytes:
    return json.dumps({"id": "WH-1", "event_type": kind, "resource": {"id": order_id}}).encode()


BODY = event_about("O")


def refusals() -> list[str]:
    events = AuditEvent.objects.filter(action="paypal.event_refused")
    return [event.after["reason"] for event in events]


def test_a_webhook_has_the_order_looked_at(paypal, eager_tasks, django_capture_on_commit_callbacks):
    team = make_wallet()
    top_up = buy(team)
    paypal.approve(top_up.order_id)
    raw = event_about(top_up.order_id)
    for _ in range(3):
        with django_capture_on_commit_callbacks(execute=True):
            assert deliver(raw, paypal.signed(raw)).status_code == 200
    assert_credited_once(team, paypal)
    event = InboundEvent.objects.get()
    assert (bytes(event.raw), event.verified, event.about) == (raw, True, top_up.order_id)
    assert "paypal-transmission-sig" in event.headers
    assert event.applied_at is not None


def test_the_figures_of_a_signed_event_are_not_believed_either(
    paypal, eager_tasks, django_capture_on_commit_callbacks
):
    """Whoever had PayPal's key would gain nothing: amounts come from the API."""
    team = make_wallet()
    top_up = buy(team)
    raw = json.dumps(
        {
            "event_type": "PAYMENT.CAPTURE.COMPLETED",
            "resource": {
                "id": "FAKE", "status": "COMPLETED", "amount": {"currency_code": "USD", "value": "1000000.00"},
                "supplementary_data": {"related_ids": {"order_id": top_up.order_id}},
            },
        }
    ).encode()  # fmt: skip
    with django_capture_on_commit_callbacks(execute=True):
        assert deliver(raw, paypal.signed(raw)).status_code == 200
    assert wallet(team.code).posted == 0


def spoiled(paypal, **change: str | None) -> dict[str, str]:
    headers = {name.lower(): value for name, value in paypal.signed(BODY).items()}
    for name, value in change.items():
        header = f"paypal-{name.replace('_', '-')}"
        if value is None:
            del headers[header]
        else:
            headers[header] = value
    return headers


def at(**ago: float) -> str:
    return (datetime.now(UTC) - timedelta(**ago)).isoformat(timespec="seconds").replace("+00:00", "Z")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"transmission_sig": None}, "headers of a signature are missing"),
        ({"cert_url": None}, "headers of a signature are missing"),
        ({"transmission_sig": "AAAA"}, "does not fit the body"),
        ({"transmission_sig": "not base64!"}, "not base64"),
        ({"transmission_id": "another"}, "does not fit the body"),
        ({"transmission_time": at(minutes=1)}, "does not fit the body"),
        ({"transmission_time": at(days=5)}, "outside of the window"),
        ({"transmission_time": at(minutes=-10)}, "outside of the window"),
        ({"transmission_time": "yesterday"}, "malformed"),
        ({"transmission_time": "2026-12-01T00:00:00"}, "no zone"),
        ({"auth_algo": "none"}, "algorithm"),
        ({"auth_algo": "HS256"}, "algorithm"),
        ({"cert_url": "https://evil.example/v1/notifications/certs/CERT-1"}, "not on the stand-in's host"),
    ],
)
def test_what_paypal_did_not_sign_is_refused_and_leaves_a_trace(paypal, change, reason):
    assert deliver(BODY, spoiled(paypal, **change)).status_code == 400
    assert not InboundEvent.objects.exists()
    [why] = refusals()
    assert reason in why
    assert BODY.decode() not in str(AuditEvent.objects.get().after)


def test_the_signature_is_of_the_very_bytes(paypal):
    headers = paypal.signed(BODY)
    assert deliver(BODY + b" ", headers).status_code == 400
    assert deliver(BODY, headers).status_code == 200


def test_a_signature_for_another_webhook_is_refused(paypal, settings):
    headers = paypal.signed(BODY)
    settings.PAYPAL_WEBHOOK_ID = "ANOTHER"
    assert deliver(BODY, headers).status_code == 400


def test_without_a_webhook_id_nothing_is_believed(paypal, settings):
    settings.PAYPAL_WEBHOOK_ID = ""
    assert deliver(BODY, paypal.signed(BODY)).status_code == 503
    assert not InboundEvent.objects.exists()


@pytest.mark.parametrize(
    "url",
    [
        "http://api.paypal.com/v1/notifications/certs/CERT-1",
        "https://api.paypal.com.evil.example/v1/notifications/certs/CERT-1",
        "https://evil.example/v1/notifications/certs/CERT-1",
        "https://api.paypal.com@evil.example/v1/notifications/certs/CERT-1",
        "https://api.paypal.com:8443/v1/notifications/certs/CERT-1",
        "https://api.paypal.com:x/v1/notifications/certs/CERT-1",
        "https://api.paypal.com/v1/notifications/certs/../../redirect",
        "https://api.paypal.com/v1/notifications/certs/CERT-1?next=http://evil.example",
        "https://api.paypal.com/elsewhere",
        "https://169.254.169.254/v1/notifications/certs/CERT-1",
        "https://api.sandbox.paypal.com/v1/notifications/certs/CERT-1",
        "file:///v1/notifications/certs/CERT-1",
        "",
    ],
)
def test_a_certificate_comes_from_paypal_only(settings, url):
    settings.PAYPAL_MODE = "live"
    with pytest.raises(CertificateRefused):
        check_address(url)


def test_paypals_own_addresses_are_taken(settings):
    settings.PAYPAL_MODE = "live"
    check_address("https://api.paypal.com/v1/notifications/certs/CERT-360caa42-fca2a594-5edc0ebc")
    settings.PAYPAL_MODE = "sandbox"
    check_address("https://api.sandbox.paypal.com/v1/notifications/certs/CERT-360caa42-fca2a594-5edc0ebc")


class Answer:
    """What the certificate's address answers."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self.body, self.status_code = body, status

    def __enter__(self):
        return self

    def __exit__(self, *args): ...

    def iter_content(self, size):
        for start in range(0, len(self.body), size):
            yield self.body[start : start + size]


@pytest.fixture
def certificate(paypal, monkeypatch):
    """Lets the certificate's address answer something else, and counts how often it is asked."""
    asked: list[dict] = []

    def answer(body: bytes, status: int = 200) -> list[dict]:
        def get(url: str, **options):
            asked.append(options)
            return Answer(body, status)

        monkeypatch.setattr(certificates.requests, "get", get)
        certificates.forget_certificates()
        return asked

    return answer


def sign_with(key, headers: dict[str, str]) -> dict[str, str]:
    import base64
    import zlib

    signed = f"{headers['Paypal-Transmission-Id']}|{headers['Paypal-Transmission-Time']}|STUB-WEBHOOK|{zlib.crc32(BODY)}"
    signature = key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    return headers | {"Paypal-Transmission-Sig": base64.b64encode(signature).decode()}


def test_a_certificate_of_another_authority_is_refused(paypal, certificate):
    """It names our authority as its issuer, and signs everything well: its chain does not hold."""
    key, pem = make_certificate(make_authority())
    certificate(pem)
    assert deliver(BODY, sign_with(key, paypal.signed(BODY))).status_code == 400
    assert "chain does not hold" in refusals()[0]


@pytest.fixture
def trusted(paypal, settings, tmp_path):
    """An authority that the settings trust, and whose key the test has."""
    from cryptography.hazmat.primitives.serialization import Encoding

    authority = make_authority()
    (tmp_path / "other.pem").write_bytes(authority[1].public_bytes(Encoding.PEM))
    settings.PAYPAL_STUB_CA = str(tmp_path / "other.pem")
    return authority


def test_the_right_certificate_of_that_authority_is_taken(paypal, trusted, certificate):
    key, pem = make_certificate(trusted)
    certificate(pem)
    assert deliver(BODY, sign_with(key, paypal.signed(BODY))).status_code == 200


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "messageverificationcerts.evil.example"}, "chain does not hold"),
        ({"starts": datetime.now(UTC) - timedelta(days=400)}, "not valid today"),
        ({"starts": datetime.now(UTC) + timedelta(days=1)}, "not valid today"),
    ],
)
def test_a_certificate_for_another_name_or_time_is_refused(paypal, trusted, certificate, change, reason):
    key, pem = make_certificate(trusted, **change)
    certificate(pem)
    assert deliver(BODY, sign_with(key, paypal.signed(BODY))).status_code == 400
    assert reason in refusals()[0]


@pytest.mark.parametrize("body", [b"hello", b"x" * 100_000])
def test_rubbish_at_the_certificates_address_is_refused(paypal, certificate, body):
    certificate(body)
    assert deliver(BODY, paypal.signed(BODY)).status_code == 400


def test_the_certificate_is_kept_and_asked_for_without_redirects(paypal, certificate):
    asked = certificate(signer().certificate_pem)
    for number in range(3):
        raw = event_about(f"O{number}")
        assert deliver(raw, paypal.signed(raw)).status_code == 200
    assert len(asked) == 1
    assert asked[0]["allow_redirects"] is False
    assert asked[0]["timeout"]


def test_no_more_certificates_are_kept_than_a_few(paypal, certificate):
    certificate(signer().certificate_pem)
    for number in range(certificates.KEPT + 5):
        certificates.signing_key(f"{paypal.url}/v1/notifications/certs/CERT-{number}")
    assert len(certificates._cache._kept) == certificates.KEPT


def test_where_the_certificate_does_not_come_paypal_is_asked(paypal, certificate):
    certificate(b"", status=500)
    assert deliver(BODY, paypal.signed(BODY)).status_code == 200
    assert deliver(BODY, spoiled(paypal, transmission_sig="AAAA")).status_code == 400
    assert refusals() == ["PayPal disowns it"]


def test_when_nobody_can_tell_paypal_shall_send_it_again(paypal, certificate):
    certificate(b"", status=500)
    paypal.break_("verify", "error")
    assert deliver(BODY, paypal.signed(BODY)).status_code == 503
    assert not InboundEvent.objects.exists()
    assert deliver(BODY, paypal.signed(BODY)).status_code == 200


def test_a_flood_of_what_we_cannot_check_does_not_become_a_flood_at_paypal(paypal, certificate, monkeypatch):
    certificate(b"", status=500)
    monkeypatch.setattr("ledger.paypal.signature.questions", Throttle(2, 60))
    headers = spoiled(paypal, transmission_sig="AAAA")
    assert [deliver(BODY, headers).status_code for _ in range(4)] == [400, 400, 503, 503]


def test_a_flood_of_forgeries_does_not_flood_the_audit_trail(paypal):
    for number in range(20):
        assert deliver(b"%d" % number, {}).status_code == 400
    assert len(refusals()) == 1


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
def test_the_unknown_is_stored_and_answered(paypal, eager_tasks, django_capture_on_commit_callbacks, raw):
    with django_capture_on_commit_callbacks(execute=True):
        assert deliver(raw, paypal.signed(raw)).status_code == 200
    event = InboundEvent.objects.get()
    assert (bytes(event.raw), event.error, event.parked_at) == (raw, "", None)
    assert event.applied_at is not None


def test_only_posts_of_a_sensible_size_are_taken():
    assert paypal_webhook(RequestFactory().get("/v1/webhooks/paypal")).status_code == 405
    assert deliver(b"x" * (MAX_BODY_BYTES + 1), {}).status_code == 413
    assert not InboundEvent.objects.exists()


def test_every_kind_of_event_says_what_it_is_about():
    def subject(kind: str, **resource: object):
        return subject_of(json.dumps({"event_type": kind, "resource": resource}).encode())

    assert subject("CHECKOUT.ORDER.APPROVED", id="A").order_id == "A"
    assert subject("CHECKOUT.PAYMENT-APPROVAL.REVERSED", order_id="A").order_id == "A"
    capture = subject("PAYMENT.CAPTURE.COMPLETED", id="C", custom_id="ours",
                      supplementary_data={"related_ids": {"order_id": "B"}})  # fmt: skip
    assert (capture.order_id, capture.reference, capture.took_money) == ("B", "ours", True)
    assert subject("PAYMENT.CAPTURE.PENDING", id="C").took_money is False
    assert subject("PAYMENT.CAPTURE.REFUNDED", id="R").about is About.RETURN
    assert subject("PAYMENT.CAPTURE.REVERSED", id="R").reversed
    assert subject("CUSTOMER.DISPUTE.CREATED", dispute_id="D").external_id == "D"
    assert subject("BILLING.PLAN.CREATED", id="P").about is About.NOTHING


def test_what_the_stand_in_really_sends_is_believed(paypal, eager_tasks, django_capture_on_commit_callbacks):
    """Over HTTP: its headers, its bytes, its certificate."""
    sent: queue.Queue[tuple[bytes, dict[str, str]]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.put((self.rfile.read(int(self.headers["Content-Length"])), dict(self.headers)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        paypal._stub.webhooks.url = f"http://127.0.0.1:{server.server_port}/"
        team = make_wallet()
        top_up = buy(team)
        paypal.approve(top_up.order_id)
        raw, headers = sent.get(timeout=10)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with django_capture_on_commit_callbacks(execute=True):
        assert deliver(raw, headers).status_code == 200
    assert_credited_once(team, paypal)


def test_the_stands_in_own_webhooks_are_signed_like_paypals(paypal):
    """What the health check and a person would look at: the certificate is at the address that the headers name."""
    headers = paypal.signed(BODY)
    assert requests.get(headers["Paypal-Cert-Url"], timeout=5).content == signer().certificate_pem
    assert requests.get(headers["Paypal-Cert-Url"] + "0", timeout=5).status_code == 404
