"""The books in the back office: all of it to be read, none of it to be changed, in a fixed number of queries."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from djmoney.money import Money
from paypal.standard.ipn.models import PayPalIPN

from ledger.admin import ReadOnly
from ledger.models import (
    Account,
    AuditEvent,
    Difference,
    Dispute,
    Journal,
    Payout,
    Reconciliation,
    Refund,
    Settlement,
    TopUp,
)
from ledger.paypal.store import store_event
from ledger.services import (
    close_period,
    create_hold,
    platform_account,
    post_journal,
    record_audit_event,
    settle_refund,
)
from tests.ledger.conftest import make_wallet, spend

MODELS = (
    "journal", "account", "hold", "settlement", "topup", "inboundevent", "auditevent", "periodclose", "refund",
    "dispute", "parkedrefund", "reconciliation", "difference", "payout",
)  # fmt: skip


@pytest.fixture
def staff(db, settings) -> Client:
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    }
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def fill(count: int) -> None:
    revenue = platform_account(code="usage_revenue", currency="USD")
    clearing, fees = (platform_account(code=c, currency="USD") for c in ("paypal_clearing", "processor_fees"))
    for _ in range(count):
        team = make_wallet("10")
        post_journal(
            scope="t", key=team.code, kind="usage", currency="USD",
            lines=spend(team, revenue, "0.000000025"), actor="test",
        )  # fmt: skip
        create_hold(account=team, amount=Money(1, "USD"), key=team.code, ttl=timedelta(hours=1), actor="test")
        top_up = TopUp.objects.create(
            account=team, amount=Money(5, "USD"), idempotency_key=team.code, order_id=team.code[-30:],
            actor="test", state="approving",
        )  # fmt: skip
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT settle_apply('paypal', 'capture', %s, 'O', %s, %s, %s, %s, 'USD', 5, 1, 'test', now())",
                [team.code[-30:], top_up.pk, team.pk, clearing.pk, fees.pk],
            )
        store_event(channel="paypal.webhook", raw=team.code.encode(), about="", verified=True)
        record_audit_event(actor="test", action="filled", object_type="wallet", object_id=team.code)
        fill_queues(team, team.code[-30:])


def fill_queues(team: Account, key: str) -> None:
    """A row for everything that PayPal and the bank make people look at."""
    common = {"account": team, "amount": Money(1, "USD"), "actor": "test", "idempotency_key": key}
    Refund.objects.create(capture=Settlement.objects.get(external_id=key), reason="asked for", **common)
    Dispute.objects.create(
        provider="paypal", external_id=key, capture_id=key, amount=Money(1, "USD"), state="open",
        opened_at=timezone.now(), told_at=timezone.now(),
    )  # fmt: skip
    settle_refund(
        provider="paypal", external_id=f"R{key}", capture_id="unknown", amount=Money(1, "USD"), fee=Decimal(0),
        actor="test",
    )  # fmt: skip
    day = date(2026, 1, 1)
    Reconciliation.objects.create(
        provider="paypal", day=day, theirs=1, ours=1, healed=0, differences=1, started_at=timezone.now()
    )
    Difference.objects.create(
        provider="paypal", kind="missing_here", external_id=key, day=day, currency="USD", their_gross=1
    )
    Payout.objects.create(payee="RunPod", amount=Money(1, "USD"), actor="test", idempotency_key=key)


@pytest.mark.parametrize("model", MODELS)
def test_lists_take_the_same_number_of_queries_however_long(staff, model):
    url = reverse(f"admin:ledger_{model}_changelist")

    def queries() -> int:
        with CaptureQueriesContext(
            connection,
        ) as captured:
            assert staff.get(url).status_code == 200
        return len(captured)

    fill(1)
    queries()  # fills Django's own caches
    few = queries()
    fill(4)
    assert queries() == few


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_added_changed_or_deleted(staff, model):
    fill(1)
    if model == "periodclose":
        close_period(through=date(2001, 1, 1), actor="staff")
    row = apps.get_model("ledger", model).objects.first()
    assert staff.get(reverse(f"admin:ledger_{model}_add")).status_code == 403
    page = reverse(f"admin:ledger_{model}_change", args=[row.pk])
    assert staff.get(page).status_code == 200
    assert b'name="_save"' not in staff.get(page).content
    assert staff.post(page, {}).status_code == 403
    assert (
        staff.post(reverse(f"admin:ledger_{model}_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
    )
    staff.post(
        reverse(f"admin:ledger_{model}_changelist"),
        {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"},
    )
    assert apps.get_model("ledger", model).objects.filter(pk=row.pk).exists()


def test_a_journal_shows_its_legs_to_the_last_decimal(staff):
    fill(1)
    journal = Journal.objects.get(kind="usage")
    page = staff.get(reverse("admin:ledger_journal_change", args=[journal.pk])).content.decode()
    assert "0.000000025 USD" in page
    assert "-0.000000025 USD" in page
    assert "usage_revenue:USD" in page


def test_an_account_shows_its_balance(staff):
    fill(1)
    assert (
        "0.000000025"
        in staff.get(reverse("admin:ledger_account_changelist") + "?q=usage_revenue").content.decode()
    )
    wallet = Account.objects.get(code__startswith="customer_credit")
    page = staff.get(reverse("admin:ledger_account_change", args=[wallet.pk])).content.decode()
    assert "14.999999975" in page


def test_every_table_of_the_books_has_a_page_and_all_of_them_are_read_only():
    registered = {
        model._meta.model_name: page
        for model, page in admin.site._registry.items()
        if model._meta.app_label == "ledger"
    }
    assert set(registered) == set(MODELS)
    assert all(isinstance(page, ReadOnly) for page in registered.values())


def test_the_audit_trail_keeps_what_it_is_given(db):
    record_audit_event(
        actor="user:ann", action="price.changed", object_type="price", object_id="7",
        before={"rate": Money("1", "USD").amount}, after={"rate": 2}, request_id="r-1",
    )  # fmt: skip
    event = AuditEvent.objects.get()
    assert (event.before, event.after, event.request_id) == ({"rate": "1"}, {"rate": 2}, "r-1")


def test_the_log_of_notifications_can_be_read_only(staff):
    row = PayPalIPN.objects.create(txn_id="T", payment_status="Completed")
    assert staff.get(reverse("admin:ipn_paypalipn_changelist")).status_code == 200
    page = reverse("admin:ipn_paypalipn_change", args=[row.pk])
    assert staff.get(page).status_code == 200
    assert staff.post(page, {}).status_code == 403
    assert staff.get(reverse("admin:ipn_paypalipn_add")).status_code == 403
