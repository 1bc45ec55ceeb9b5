"""The books in the back office: all of it to be read, none of it to be changed, in a fixed number of queries."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from djmoney.money import Money
from paypal.standard.ipn.models import PayPalIPN

from ledger.admin.base import ReadOnly
from ledger.models import (
    Account,
    AuditEvent,
    CreditGrant,
    Difference,
    Dispute,
    Hold,
    Journal,
    Payout,
    Reconciliation,
    Refund,
    Settlement,
    TopUp,
    Verification,
)
from ledger.paypal.store import store_event
from ledger.services import (
    close_period,
    create_hold,
    grant_credit,
    platform_account,
    post_journal,
    record_audit_event,
    settle_refund,
)
from tests.ledger.conftest import make_wallet, spend
from tests.ledger.test_proposals import adjustment

MODELS = (
    "journal", "account", "hold", "settlement", "topup", "inboundevent", "auditevent", "periodclose",
    "parkedrefund", "proposal", "verification", "creditgrant", "refund", "dispute", "difference",
    "reconciliation", "payout",
)  # fmt: skip

NOW = datetime.now(UTC)


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
        settle_refund(
            provider="paypal", external_id=f"R{team.pk}", capture_id="not yet", amount=Money(1, "USD"),
            fee=Decimal(0), actor="test",
        )  # fmt: skip
        adjustment(team)
        grant_credit(
            account=team,
            kind=CreditGrant.Kind.PROMOTIONAL,
            amount=Money(3, "USD"),
            key=team.code,
            actor="test",
        )
        Refund.objects.create(
            capture=Settlement.objects.get(external_id=team.code[-30:]), account=team, amount=Money(1, "USD"),
            idempotency_key=team.code, reason="r", actor="test",
        )  # fmt: skip
        Dispute.objects.create(
            provider="paypal", external_id=team.code[-30:], capture_id=team.code[-30:], amount=Money(1, "USD"),
            state="open", opened_at=NOW, told_at=NOW,
        )  # fmt: skip
        Difference.objects.create(
            provider="paypal", kind="missing_here", external_id=team.code[-30:], day=NOW.date(), currency="USD",
            their_gross=1, their_fee=0,
        )  # fmt: skip
        Reconciliation.objects.create(
            provider="paypal", day=NOW.date(), theirs=1, ours=0, healed=0, differences=1, started_at=NOW
        )
        Payout.objects.create(
            payee="gpu.example", amount=Money(1, "USD"), idempotency_key=team.code, actor="test"
        )
        Verification.objects.create(started_at=NOW, finished_at=NOW, ok=True, checks=[])
        record_audit_event(actor="test", action="filled", object_type="wallet", object_id=team.code)


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
    revenue = Account.objects.get(code="usage_revenue:USD")
    page = staff.get(reverse("admin:ledger_account_change", args=[revenue.pk])).content.decode()
    assert "0.000000025 USD" in page
    wallet = Account.objects.get(code__startswith="customer_credit")
    page = staff.get(reverse("admin:ledger_account_change", args=[wallet.pk])).content.decode()
    for figure in ("17.999999975 USD", "1.00 USD", "16.999999975 USD"):  # posted, held, available
        assert figure in page
    assert reverse("admin:ledger_hold_change", args=[Hold.objects.get(account=wallet).pk]) in page
    assert reverse("admin:ledger_settlement_change", args=[Settlement.objects.get(account=wallet).pk]) in page
    assert "promotional" in page


def test_an_accounts_page_takes_the_same_queries_however_old_it_is(staff, django_assert_num_queries):
    team = make_wallet("100")
    revenue = platform_account(code="usage_revenue", currency="USD")
    url = reverse("admin:ledger_account_change", args=[team.pk])

    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert staff.get(url).status_code == 200
        return len(captured)

    def use(first: int, times: int) -> None:
        for n in range(first, first + times):
            post_journal(
                scope="t",
                key=str(n),
                kind="usage",
                currency="USD",
                lines=spend(team, revenue, "1"),
                actor="t",
            )

    use(0, 1)
    queries()
    few = queries()
    use(1, 60)
    assert queries() == few
    page = staff.get(url).content.decode()
    assert "Older →" in page
    seen, position = [], ""
    while position is not None:
        page = staff.get(url + position).content.decode()
        seen += [Decimal(found) for found in re.findall(r'class="number">(-?[0-9.]+) USD</td>\s*</tr>', page)]
        older = re.search(r'href="(\?before=[0-9]+)', page)
        position = older[1] if older else None
    assert seen == [Decimal(100 - n) for n in range(61, -1, -1)]


def test_lists_go_by_position_and_hold_every_row_once(staff):
    for _ in range(3):
        fill(40)
    url, seen, query = reverse("admin:ledger_journal_changelist"), [], ""
    while query is not None:
        with CaptureQueriesContext(connection) as captured:
            page = staff.get(url + query).content.decode()
        assert not [q for q in captured if "COUNT(" in q["sql"] and "ledger_journal" in q["sql"]]
        seen += [int(pk) for pk in re.findall(r"/admin/ledger/journal/([0-9]+)/change/", page)]
        older = re.search(r'href="(\?before=[0-9]+)"', page)
        query = older[1] if older else None
    assert (
        sorted(seen, reverse=True)
        == seen
        == list(Journal.objects.order_by("-pk").values_list("pk", flat=True))
    )


def test_the_trial_balance_balances_and_goes_back_in_time(staff):
    fill(2)
    url = reverse("admin:ledger_trial_balance")
    page = staff.get(url).content.decode()
    assert "balances" in page
    assert "does not balance" not in page
    assert "35.99999995 USD" in page  # both wallets in one line
    assert "Nothing was booked until then" in staff.get(url, {"through": "2001-01-01"}).content.decode()
    assert "is no date" in staff.get(url, {"through": "soon"}).content.decode()


def test_a_wallets_statement_comes_from_its_page(staff):
    fill(1)
    wallet = Account.objects.get(code__startswith="customer_credit")
    page = staff.get(reverse("admin:ledger_account_change", args=[wallet.pk])).content.decode()
    address = f"/admin/ledger/account/{wallet.pk}/statement/{NOW:%Y-%m}.csv"
    assert address in page
    assert staff.get(address).content.startswith(b"date,kind")
    bank = platform_account(code="bank", currency="USD")
    assert staff.get(f"/admin/ledger/account/{bank.pk}/statement/{NOW:%Y-%m}.csv").status_code == 404


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
