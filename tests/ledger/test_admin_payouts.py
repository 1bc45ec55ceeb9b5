"""A provider's bill and its payout, as two clerks and a bank do them."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from html import unescape

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from djmoney.money import Money

from ledger.errors import IdempotencyConflict
from ledger.models import Journal, Payout, Proposal
from ledger.payouts import book_bill, owed_to_payees
from ledger.selectors import account_balance
from ledger.services import platform_account, reverse_journal
from ledger.verify import verify_books
from tests.ledger.test_admin_proposals import clerk, decide, plain_static_files
from tests.ledger.test_proposals import WHY

pytestmark = pytest.mark.django_db
__all__ = ["plain_static_files"]
LIST = "/admin/ledger/payout/"


@pytest.fixture
def ann(db) -> Client:
    return clerk("ann", "add_proposal", "view_payout", "change_payout")


@pytest.fixture
def bob(db) -> Client:
    return clerk("bob", "change_proposal", "view_payout")


def propose(client: Client, kind: str, **fields: str):
    asked = {"payee": "RunPod", "currency": "USD", "reason": WHY, **fields}
    return client.post(reverse("admin:ledger_propose", args=[kind]), asked)


def billed(amount: str = "100", number: str = "INV-1", payee: str = "RunPod") -> None:
    book_bill(payee=payee, number=number, amount=Money(amount, "USD"), reason=WHY, actor="test")


def move(client: Client, payout: Payout, action: str, **fields: str):
    return client.post(reverse("admin:ledger_payout_move", args=[payout.pk, action]), fields, follow=True)


def today() -> str:
    return f"{timezone.now():%Y-%m-%d}"


def owed() -> list[tuple[str, Decimal, Decimal, Decimal]]:
    return [(each.payee, each.under_way, each.paid, each.left) for each in owed_to_payees()]


def test_from_the_bill_to_the_banks_statement(ann, bob):
    assert "Book a bill first" in ann.get(LIST).text
    propose(ann, "bill", number="INV-1", amount="100")
    assert "Approved, and done." in decide(bob, Proposal.objects.get(), "approve").text
    page = ann.get(LIST).text
    assert "100.00 USD" in page
    [link] = re.findall(r'href="([^"]+propose/payout/[^"]+)"', page)
    form = ann.get(unescape(link)).text
    assert 'value="RunPod"' in form
    assert 'value="100"' in form

    proposed = propose(ann, "payout", amount="60")
    decide(bob, Proposal.objects.get(kind="payout"), "approve")
    assert proposed.status_code == 302
    payout = Payout.objects.get()
    assert (payout.payee, payout.state, owed()) == ("RunPod", "intended", [("RunPod", 60, 0, 40)])
    page = reverse("admin:ledger_payout_change", args=[payout.pk])
    assert "The bank has the order" in ann.get(page).text
    assert "The bank has the order" not in bob.get(page).text
    assert "The payout is sent." in move(ann, payout, "sent").text
    assert "The bank has the order" not in ann.get(page).text
    told = move(ann, payout, "confirm", bank_reference="E2E-1", paid_on=today()).text
    assert "The payout is paid." in told
    assert owed() == [("RunPod", 0, 60, 40)]
    assert -account_balance(platform_account(code="bank", currency="USD")) == -60
    assert "Confirm that it is paid" not in ann.get(page).text
    assert [result.name for result in verify_books() if not result.ok] == []


def test_what_is_wrong_is_said_beside_the_field_and_nothing_is_done(ann):
    billed("100")
    again = propose(ann, "bill", number="INV-1", amount="100")
    assert again.status_code == 422
    assert "INV-1 of RunPod is booked already" in again.text
    assert "more than the 100.00 USD" in propose(ann, "payout", amount="100.01").text
    assert "Nobody of this name has billed us" in propose(ann, "payout", payee="Lambda", amount="1").text
    assert "Three capital letters" in propose(ann, "payout", amount="1", currency="usd").text
    assert not Proposal.objects.exists()


def test_the_same_bill_proposed_twice_is_booked_once(ann, bob):
    for _ in range(2):
        propose(ann, "bill", number="INV-7", amount="10")
    first, second = Proposal.objects.order_by("pk")
    decide(bob, first, "approve")
    assert "booked already" in decide(bob, second, "approve").text
    assert Journal.objects.filter(kind="provider_bill").count() == 1
    with pytest.raises(IdempotencyConflict):
        billed(number="INV-7")


def test_two_payouts_that_fit_alone_do_not_fit_together(ann, bob):
    billed("100")
    for _ in range(2):
        propose(ann, "payout", amount="60")
    first, second = Proposal.objects.order_by("pk")
    decide(bob, first, "approve")
    assert "at most the 40 USD owed" in decide(bob, second, "approve").text
    assert Payout.objects.count() == 1


@pytest.fixture
def payout(ann, bob) -> Payout:
    billed("100")
    propose(ann, "payout", amount="30")
    decide(bob, Proposal.objects.get(), "approve")
    return Payout.objects.get()


def test_a_confirmation_needs_a_reference_and_a_day_that_has_been(ann, payout):
    tomorrow = f"{timezone.now() + timedelta(days=1):%Y-%m-%d}"
    refused = move(ann, payout, "confirm", bank_reference="", paid_on=tomorrow)
    assert refused.status_code == 422
    assert "That day has not come yet" in refused.text
    assert "id_bank_reference_error" in refused.text
    payout.refresh_from_db()
    assert payout.state == "intended"


def test_one_reference_of_the_bank_pays_once(ann, bob, payout):
    move(ann, payout, "confirm", bank_reference="E", paid_on=today())
    propose(ann, "payout", amount="5")
    decide(bob, Proposal.objects.get(state="open"), "approve")
    other = Payout.objects.get(state="intended")
    assert "has paid another payout" in move(ann, other, "confirm", bank_reference="E", paid_on=today()).text
    assert "cannot become cancelled" in move(ann, payout, "cancel", why="a mistake").text


def test_a_cancelled_payout_leaves_what_is_owed(ann, payout):
    assert "The payout is cancelled." in move(ann, payout, "cancel", why="the bank sent it back").text
    assert owed() == [("RunPod", 0, 0, 100)]


def test_a_bill_that_is_taken_back_is_not_owed():
    billed("100")
    reverse_journal(journal_id=Journal.objects.get(kind="provider_bill").pk, reason=WHY, actor="test")
    assert owed() == []


def test_who_may_only_look_moves_nothing(bob, payout):
    assert move(bob, payout, "sent").status_code == 403
    assert move(bob, payout, "confirm", bank_reference="E", paid_on=today()).status_code == 403


def test_a_page_that_is_only_asked_for_moves_nothing(ann, payout):
    assert ann.get(reverse("admin:ledger_payout_move", args=[payout.pk, "sent"])).status_code == 404
    assert move(ann, payout, "nonsense").status_code == 404
