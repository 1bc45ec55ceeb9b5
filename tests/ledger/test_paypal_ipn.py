"""The second rail: notifications, and each hole of django-paypal's way with them closed."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from urllib.parse import urlencode

import pytest
import requests
from django.apps import apps
from django.core.management import call_command
from django.db import connections
from django.test import RequestFactory
from paypal.standard.ipn.models import PayPalIPN
from paypal.standard.ipn.signals import valid_ipn_received

from ledger.models import AuditEvent, InboundEvent, Settlement, TopUp
from ledger.paypal import events
from ledger.paypal.events import apply_event, due_events
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable
from ledger.paypal.ipn import postback
from ledger.paypal.ipn.inbox import MAX_BODY_BYTES, paypal_ipn
from ledger.paypal.ipn.message import Malformed, read_message
from ledger.paypal.ipn.rail import PayPalIpn
from ledger.paypal.orders import settle_top_up
from ledger.paypal.refunds import start_refund
from ledger.paypal.throttle import Throttle
from ledger.selectors import wallet
from ledger.verify import verify_books
from tests.ledger.conftest import make_wallet
from tests.ledger.test_paypal import Crash, buy

FORM = "application/x-www-form-urlencoded"


class Shop:
    """One purchase of 25 USD by a payment button."""

    def __init__(self, paypal) -> None:
        self.paypal = paypal
        self.team = make_wallet()
        self.top_up = buy(self.team)

    def message(self, **change: str) -> dict[str, str]:
        fields = {
            "txn_type": "web_accept", "txn_id": "TXN1", "payment_status": "Completed", "mc_gross": "25.00",
            "mc_fee": "1.36", "mc_currency": "USD", "invoice": str(self.top_up.public_id),
            "custom": str(self.top_up.public_id), "business": "merchant@stub.invalid",
            "receiver_email": "merchant@stub.invalid", "payment_date": "20:12:59 Jan 13, 2026 PST",
            "charset": "utf-8",
        }  # fmt: skip
        return fields | change

    def genuine(self, **change: str) -> bytes:
        return self.paypal.notification(**self.message(**change))

    def tell(self, raw: bytes) -> InboundEvent:
        """Delivered, then applied as the worker does."""
        assert deliver(raw).status_code == 200
        event = InboundEvent.objects.latest("pk")
        apply_event(event_id=event.pk)
        event.refresh_from_db()
        return event

    @property
    def credit(self) -> Decimal:
        return wallet(self.team.code).posted


def deliver(raw: bytes, content_type: str = FORM):
    return paypal_ipn(RequestFactory().post("/v1/paypal/ipn", raw, content_type=content_type))


def refusals() -> list[str]:
    return [
        event.after["reason"]
        for event in AuditEvent.objects.filter(action="paypal.event_refused").order_by("pk")
    ]


def broken() -> list[str]:
    return [result.name for result in verify_books() if not result.ok]


@pytest.fixture(autouse=True)
def _on_the_ipn_rail(settings):
    settings.PAYPAL_RAIL = "ipn"


@pytest.fixture
def shop(db, paypal) -> Shop:
    return Shop(paypal)


def test_a_payment_by_button_is_credited_when_paypal_vouches_for_its_notification(shop):
    assert shop.top_up.approve_url.startswith(f"{shop.paypal.url}/cgi-bin/webscr?cmd=_xclick&")
    event = shop.tell(shop.genuine())
    assert (event.verified, event.error, shop.credit) == (True, "", 25)
    settlement = Settlement.objects.get()
    assert (settlement.external_id, settlement.fee, settlement.occurred_at.isoformat()) == (
        "TXN1", Decimal("1.36"), "2026-01-14T04:12:59+00:00",
    )  # fmt: skip
    assert TopUp.objects.get().state == "settled"
    row = PayPalIPN.objects.get()
    assert (row.txn_id, row.flag, row.response) == ("TXN1", False, "VERIFIED")
    assert broken() == []


def test_django_paypal_has_no_migration_of_its_own_to_write(db):
    call_command("makemigrations", "ipn", check=True, dry_run=True, verbosity=0)
    assert apps.get_app_config("ipn").default_auto_field == "django.db.models.AutoField"


def test_nothing_of_ours_listens_to_its_signals():
    assert valid_ipn_received.receivers == []


# The eight holes.


@pytest.mark.parametrize("pending_first", [True, False])
def test_hole_a_completed_pending_completed_is_credited_once(shop, pending_first):
    """It compares with the latest row only, so a late Pending makes the next Completed valid again."""
    pending = shop.genuine(payment_status="Pending", pending_reason="echeck", mc_fee="")
    if pending_first:
        assert shop.tell(pending).error == ""
        assert (TopUp.objects.get().state, shop.credit) == ("pending", 0)
    for raw in (shop.genuine(), pending, shop.genuine(notify_version="3.9")):
        assert shop.tell(raw).error == ""
    assert (shop.credit, Settlement.objects.count(), TopUp.objects.get().state) == (25, 1, "settled")


@pytest.mark.parametrize("step", ["vouch", "settle_top_up"])
def test_hole_b_a_crash_in_the_work_loses_nothing(shop, eager_tasks, monkeypatch, step):
    """There PayPal's retry is flagged as a duplicate of the row that the crash left: paid, never credited."""
    raw = shop.genuine()
    deliver(raw)
    event = InboundEvent.objects.get()
    target = events.inbox if step == "vouch" else events
    done = getattr(target, step)

    def crash(*args, **kwargs):
        if step == "vouch":
            done(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(target, step, crash)
        with pytest.raises(Crash):
            apply_event(event_id=event.pk)
    assert shop.credit == 0
    shop.tell(raw)  # PayPal's retry, or the sweep
    assert (shop.credit, PayPalIPN.objects.count()) == (25, 1)


def test_hole_c_the_message_does_not_choose_who_vouches_for_it(shop, settings, monkeypatch):
    """test_ipn=1 made a live site ask the sandbox, where everybody may buy for nothing."""
    asked: list[str] = []

    def post(url: str, **options: object):
        asked.append(url)
        raise requests.ConnectionError

    raw = urlencode(shop.message(test_ipn="1")).encode()
    settings.PAYPAL_MODE, settings.PAYPAL_RECEIVER = "live", "merchant@stub.invalid"
    assert deliver(raw).status_code == 400
    assert refusals() == ["test_ipn on the live site"]
    assert not InboundEvent.objects.exists()
    monkeypatch.setattr(postback.requests, "post", post)
    for mode, host in [("live", "ipnpb.paypal.com"), ("sandbox", "ipnpb.sandbox.paypal.com")]:
        settings.PAYPAL_MODE = mode
        with pytest.raises(GatewayUnavailable):
            postback.is_paypals(raw)
        assert asked.pop() == f"https://{host}/cgi-bin/webscr"


@pytest.mark.parametrize(
    "change",
    [
        {"business": "thief@example.com", "receiver_email": "thief@example.com"},
        {"business": "", "receiver_email": ""},
        {"business": "x", "receiver_email": "MERCHANT@stub.invalid.evil"},
    ],
)
def test_hole_d_money_for_somebody_else_is_refused(shop, change):
    assert deliver(shop.genuine(**change)).status_code == 400
    assert refusals() == ["the receiver is not PAYPAL_RECEIVER"]
    assert (shop.credit, InboundEvent.objects.count()) == (0, 0)


@pytest.mark.parametrize("change", [{"mc_gross": "0.01"}, {"mc_currency": "JPY"}, {"mc_gross": "25.01"}])
def test_hole_d_another_amount_or_currency_is_credited_to_nobody_and_parked(shop, change):
    event = shop.tell(shop.genuine(**change))
    assert event.parked_at is not None
    assert "for top-up" in event.error
    assert (shop.credit, Settlement.objects.count(), TopUp.objects.get().state) == (0, 0, "failed")


def test_hole_d_without_a_receiver_in_the_settings_nothing_is_taken(shop, settings):
    settings.PAYPAL_RECEIVER = ""
    assert deliver(shop.genuine()).status_code == 400


def test_hole_e_a_dispute_is_a_dispute(shop, paypal):
    """It has no payment status, which made it an invalid notification."""
    shop.tell(shop.genuine())
    requests.post(shop.top_up.approve_url, data={"decision": "approve"}, allow_redirects=False, timeout=5)
    [capture] = paypal.captures()
    dispute = paypal.dispute(capture["id"], "8.00")
    paypal.store.disputes[dispute]["disputed_transactions"][0]["seller_transaction_id"] = "TXN1"
    fields = shop.message(txn_type="new_case", case_id=dispute, case_type="chargeback")
    for name in ("payment_status", "mc_gross", "mc_fee", "mc_currency"):
        del fields[name]
    assert shop.tell(paypal.notification(**fields)).error == ""
    assert wallet(shop.team.code).available == 17


def test_hole_f_long_and_foreign_fields_do_not_hide_a_payment(shop):
    """A `custom` above 256 characters left the whole notification unread."""
    event = shop.tell(shop.genuine(custom="x" * 300, item_name="y" * 1000))
    assert (event.error, shop.credit) == ("", 25)
    row = PayPalIPN.objects.get()
    assert row.flag
    assert "x" * 300 in row.query


@pytest.mark.parametrize(
    "content_type", ["application/json", "multipart/form-data; boundary=x", "text/plain", ""]
)
def test_hole_f_another_content_type_is_refused_and_no_error_of_ours(shop, content_type):
    assert deliver(b'{"txn_id": "TXN1"}', content_type).status_code == 415
    assert not InboundEvent.objects.exists()


def test_hole_f_a_notification_is_read_in_the_character_set_that_it_names(shop):
    raw = shop.genuine(charset="windows-1252", first_name="Zoë", last_name="Müller")
    assert b"%EB" in raw
    assert shop.tell(raw).error == ""
    assert (shop.credit, PayPalIPN.objects.get().first_name) == (25, "Zoë")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"charset=klingon&txn_id=1", "character set"),
        (b"charset=utf-8&first_name=%EB", "character set"),
        ("txn_id=é".encode(), "character set"),
        (b"txn_id=1&txn_id=2", "told twice"),
        (b"&", "empty"),
        (b"&".join(b"a%d=1" % number for number in range(300)), "character set"),
    ],
)
def test_hole_f_what_cannot_be_read_is_refused(shop, raw, reason):
    assert deliver(raw).status_code == 400
    assert reason in refusals()[0]


def test_hole_g_the_same_notification_many_times_at_once_is_credited_once(fresh_database, paypal):
    shop = Shop(paypal)
    raws = [shop.genuine(), shop.genuine(notify_version="3.9")]

    def tell(number: int) -> None:
        try:
            assert deliver(raws[number % 2]).status_code == 200
            for event_id in InboundEvent.objects.values_list("pk", flat=True):
                apply_event(event_id=event_id)
        finally:
            connections["default"].close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(tell, range(16)))
    assert (shop.credit, Settlement.objects.count(), InboundEvent.objects.count()) == (25, 1, 2)
    assert PayPalIPN.objects.count() == 2
    assert broken() == []


def test_hole_h_paypal_is_not_asked_in_the_request_and_never_for_ever(shop, monkeypatch):
    def nobody(*args: object, **options: object):
        raise AssertionError("asked in the request")

    with monkeypatch.context() as patch:
        patch.setattr(postback.requests, "post", nobody)
        answer = deliver(shop.genuine())
    assert (answer.status_code, answer.content) == (200, b"")
    options: list[dict] = []
    post = requests.post

    def watch(url: str, **given: object):
        options.append(given)
        return post(url, **given)

    monkeypatch.setattr(postback.requests, "post", watch)
    apply_event(event_id=InboundEvent.objects.get().pk)
    assert options[0]["timeout"]
    assert options[0]["allow_redirects"] is False


def test_hole_h_a_reversal_takes_credit_and_its_end_gives_it_back(shop):
    """Both arrive as valid payments there."""
    shop.tell(shop.genuine())
    undo = {"parent_txn_id": "TXN1", "reason_code": "chargeback", "txn_type": ""}
    reversed_ = shop.genuine(
        txn_id="TXN2", payment_status="Reversed", mc_gross="-25.00", mc_fee="-1.36", **undo
    )
    for _ in range(2):
        assert shop.tell(reversed_).error == ""
    assert shop.credit == 0
    back = shop.genuine(
        txn_id="TXN3", payment_status="Canceled_Reversal", mc_gross="25.00", mc_fee="1.36", **undo
    )
    assert shop.tell(back).error == ""
    assert (shop.credit, Settlement.objects.count()) == (25, 3)
    assert broken() == []


# And whatever else may come.


def test_a_forged_notification_is_never_acted_on(shop):
    event = shop.tell(urlencode(shop.message()).encode())
    assert (event.verified, shop.credit) == (False, 0)
    assert refusals() == ["PayPal disowns it"]
    assert PayPalIPN.objects.get().flag
    apply_event(event_id=event.pk)
    assert shop.credit == 0


def test_while_paypal_does_not_answer_the_notification_waits(shop, paypal):
    paypal.break_("postback", "error")
    deliver(shop.genuine())
    event = InboundEvent.objects.get()
    with pytest.raises(GatewayUnavailable):
        apply_event(event_id=event.pk)
    event.refresh_from_db()
    assert (event.verified, event.applied_at, event.parked_at) == (None, None, None)
    apply_event(event_id=event.pk)
    assert shop.credit == 25
    assert due_events(limit=5) == []


@pytest.mark.parametrize("status", ["Denied", "Failed", "Expired", "Voided"])
def test_a_payment_that_failed_credits_nothing(shop, status):
    assert shop.tell(shop.genuine(payment_status=status)).error == ""
    assert (shop.credit, TopUp.objects.get().state) == (0, "failed")


def test_a_flood_is_neither_stored_nor_passed_on_to_paypal(shop, monkeypatch):
    monkeypatch.setattr("ledger.paypal.ipn.inbox.taken", Throttle(2, 60))
    raws = [shop.genuine(txn_id=f"T{number}") for number in range(4)]
    assert [deliver(raw).status_code for raw in raws] == [200, 200, 503, 503]
    assert InboundEvent.objects.count() == 2


def test_a_status_that_nobody_knows_is_parked(shop):
    assert "not known here" in shop.tell(shop.genuine(payment_status="Teleported")).error


def test_a_payment_for_no_purchase_of_ours_is_parked(shop):
    event = shop.tell(shop.genuine(invoice="from another shop", custom=""))
    assert event.parked_at is not None
    assert "TXN1" in event.error


def test_a_notification_about_an_order_of_the_other_rail_has_that_looked_at(db, paypal, settings):
    settings.PAYPAL_RAIL = "orders"
    shop = Shop(paypal)
    paypal.approve(shop.top_up.order_id)
    event = shop.tell(shop.genuine(mc_gross="1000000.00"))
    assert event.error == ""
    [capture] = paypal.captures()
    assert (shop.credit, Settlement.objects.get().external_id) == (25, capture["id"])


def test_a_purchase_stays_on_the_rail_it_began_on(shop, settings):
    settings.PAYPAL_RAIL = "orders"
    shop.tell(shop.genuine())
    assert shop.credit == 25


def test_this_rail_cannot_refund_and_says_so(shop):
    shop.tell(shop.genuine())
    refund = start_refund(
        capture_id="TXN1", amount=shop.top_up.amount, reason="r", actor="a", idempotency_key="k"
    )
    assert refund.state == "failed"
    assert "PayPal's own pages" in refund.failure
    assert wallet(shop.team.code).available == 25


def test_an_unpaid_button_is_open(shop):
    assert settle_top_up(top_up_id=shop.top_up.pk).state == "approving"
    with pytest.raises(GatewayRefused):
        PayPalIpn().read_return("NONE")


def test_only_posts_of_a_sensible_size_are_taken(db):
    assert paypal_ipn(RequestFactory().get("/v1/paypal/ipn")).status_code == 405
    assert deliver(b"a=" + b"x" * MAX_BODY_BYTES).status_code == 413


@pytest.mark.parametrize("date", ["", "yesterday", "20:12:59 Foo 13, 2026 PST", "25:12:59 Jan 13, 2026 PST"])
def test_a_time_that_is_none_is_said_to_be_none(date):
    with pytest.raises(Malformed):
        _ = read_message(urlencode({"payment_date": date, "a": "b"}).encode()).paid_at


@pytest.mark.parametrize("amount", ["ten", "NaN", "Infinity"])
def test_an_amount_that_is_none_is_said_to_be_none(amount):
    with pytest.raises(Malformed):
        read_message(urlencode({"mc_gross": amount}).encode()).amount("mc_gross")


def test_the_stand_in_notifies_as_paypal_does(shop, paypal, monkeypatch):
    """The button's page, the notification it sends and the answer to our question fit together."""
    sent: queue.Queue[bytes] = queue.Queue()

    async def keep(url: str, body: bytes) -> None:
        sent.put(body)

    monkeypatch.setattr(paypal._stub.notifications, "_deliver", keep)
    answer = requests.post(
        shop.top_up.approve_url, data={"decision": "approve"}, allow_redirects=False, timeout=5
    )
    assert answer.headers["Location"] == "https://shop.example/back"
    assert shop.tell(sent.get(timeout=10)).error == ""
    assert shop.credit == 25
