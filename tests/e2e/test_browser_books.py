"""The ledger's back office in a real Chromium: two clerks, one correction, and pages that everybody can use."""

from __future__ import annotations

import os
from datetime import timedelta
from decimal import Decimal

import pytest
from django.contrib.auth.models import Permission, User
from django.utils import timezone
from djmoney.money import Money
from playwright.sync_api import Browser, Page, expect

from ledger.models import Account, CreditGrant, Difference, Payout, Proposal, Verification
from ledger.payouts import book_bill
from ledger.proposals import services as proposals
from ledger.selectors import wallet
from ledger.services import Line, create_hold, grant_credit, open_wallet, platform_account, post_journal
from tests.e2e.test_browser import (
    PASSWORD,
    browser,
    plain_static_files,
    pytestmark,
    quick_passwords,
    site,
    too_wide,
)
from tests.e2e.test_browser_admin import serious_of_ours

__all__ = ["browser", "plain_static_files", "pytestmark", "quick_passwords", "site"]
SHOTS = os.environ.get("APEX_TEST_SHOTS", "")


@pytest.fixture
def acme(site: str) -> Account:
    """A wallet with a history: bought, used, granted, held."""
    account = open_wallet(code="customer_credit:acme", owner="acme", currency="USD")
    bank, revenue = (platform_account(code=code, currency="USD") for code in ("bank", "usage_revenue"))
    for n in range(30):
        amount = Decimal("50") if n % 10 == 0 else Decimal("-0.0003125")
        other = bank if amount > 0 else revenue
        post_journal(
            scope="test", key=str(n), kind="top_up" if amount > 0 else "usage", currency="USD", actor="test",
            lines=[Line(account.pk, amount), Line(other.pk, -amount)],
        )  # fmt: skip
    grant_credit(
        account=account, kind=CreditGrant.Kind.PROMOTIONAL, amount=Money(5, "USD"), key="g", actor="test",
        expires_at=timezone.now() + timedelta(days=30),
    )  # fmt: skip
    create_hold(
        account=account, amount=Money("0.25", "USD"), key="answer-1", ttl=timedelta(hours=1), actor="test"
    )
    now = timezone.now()
    checks = [{"name": "journals_sum_to_zero", "ok": True, "rows": []}]
    Verification.objects.create(started_at=now, finished_at=now, ok=True, checks=checks)
    Difference.objects.create(
        provider="paypal", kind="missing_here", external_id="8XY12345AB678901C", day=now.date(), currency="USD",
        their_gross=25, their_fee=1,
    )  # fmt: skip
    return account


def clerk(browser: Browser, site: str, name: str, *rights: str) -> Page:
    user = User.objects.create_user(name, password=PASSWORD, is_staff=True)
    shown = Permission.objects.filter(codename__startswith="view_", content_type__app_label="ledger")
    user.user_permissions.set([*shown, *Permission.objects.filter(codename__in=rights)])
    page = browser.new_context(base_url=site, viewport={"width": 1280, "height": 900}).new_page()
    page.goto("/admin/login/")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Back office")).to_be_visible()
    return page


def looked_at(page: Page, name: str) -> None:
    """Nothing that keeps anybody out, nothing wider than the window; a picture for whoever asks for one."""
    assert serious_of_ours(page) == []
    assert not too_wide(page, 1280)
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/books-{name}.png", full_page=True)


def test_a_correction_goes_from_one_clerk_to_another(browser, site, acme):
    ann = clerk(browser, site, "ann", "add_proposal")
    bob = clerk(browser, site, "bob", "change_proposal", "change_difference")
    ann.goto(f"/admin/ledger/account/{acme.pk}/change/")
    expect(ann.locator(".books-figures")).to_contain_text("154.7415625 USD")  # available
    looked_at(ann, "wallet")
    ann.get_by_role("link", name="Older →").click()
    expect(ann.get_by_role("link", name="← Newest")).to_be_visible()
    ann.get_by_role("link", name="Propose an adjustment").click()
    ann.get_by_label("Amount").fill("0")
    ann.get_by_label("Reason").fill("short")
    ann.get_by_role("button", name="Propose").click()
    expect(ann.get_by_text("Zero moves nothing.")).to_be_visible()
    looked_at(ann, "propose-errors")
    ann.get_by_label("Amount").fill("12.5")
    ann.get_by_label("Reason").fill("Ticket 4711: charged twice for one answer.")
    ann.get_by_label("Reason").press("Tab")
    ann.keyboard.press("Enter")
    expect(ann.get_by_text("It is done when another person approves it")).to_be_visible()
    looked_at(ann, "proposal-own")
    proposal = Proposal.objects.get()

    bob.goto("/admin/ledger/verification/")
    bob.locator(".books-figures").get_by_role("link", name="1").first.click()
    bob.get_by_role("link", name=str(proposal.pk), exact=True).click()
    looked_at(bob, "proposal-decide")
    bob.get_by_label("Note").fill("Seen in the logs.")
    bob.get_by_role("button", name="Approve, and do it").click()
    expect(bob.get_by_text("Approved, and done.")).to_be_visible()
    assert wallet(acme.code).posted == Decimal("167.4915625")


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("proofs", "/admin/ledger/verification/"),
        ("trial-balance", "/admin/ledger/account/trial-balance/"),
        ("proposals-empty", "/admin/ledger/proposal/"),
        ("journals", "/admin/ledger/journal/"),
        ("differences", "/admin/ledger/difference/"),
        ("grant", "/admin/ledger/proposal/propose/grant/?wallet=customer_credit:acme"),
        ("periods", "/admin/ledger/periodclose/"),
        ("events", "/admin/ledger/inboundevent/"),
    ],
)
def test_pages_of_the_books_are_for_everybody(browser, site, acme, name, address):
    page = clerk(browser, site, "ann", "add_proposal")
    page.goto(address)
    looked_at(page, name)


def test_a_difference_is_resolved_with_what_was_found_out(browser, site, acme):
    page = clerk(browser, site, "bob", "change_difference")
    difference = Difference.objects.get()
    page.goto(f"/admin/ledger/difference/{difference.pk}/change/")
    page.get_by_label("What was found out").fill("A payment by hand, booked as an adjustment: proposal 12.")
    looked_at(page, "difference")
    page.get_by_role("button", name="Resolve").click()
    expect(page.get_by_text("Resolved.", exact=True)).to_be_visible()
    difference.refresh_from_db()
    assert difference.resolved_by == "user:bob"


def test_a_bill_is_paid_by_two_clerks(browser, site):
    ann = clerk(browser, site, "ann", "add_proposal", "change_payout")
    book_bill(
        payee="RunPod Inc.", number="2026-11", amount=Money("1250.5", "USD"), reason="test bill", actor="test"
    )
    ann.goto("/admin/ledger/payout/")
    looked_at(ann, "payouts-owed")
    ann.get_by_role("link", name="Propose to pay").click()
    expect(ann.get_by_label("Amount")).to_have_value("1250.5")
    ann.get_by_label("Reason").fill("Bill of November, ticket 4711")
    ann.get_by_role("button", name="Propose").click()
    expect(ann.get_by_text("It is done when another person approves it")).to_be_visible()
    proposals.approve(proposal=Proposal.objects.get(), actor="user:bob", may_exceed_limit=True)
    ann.goto(f"/admin/ledger/payout/{Payout.objects.get().pk}/change/")
    looked_at(ann, "payout-intended")
    ann.get_by_label("Bank reference").fill("E2E-2026-12-01")
    ann.get_by_role("button", name="Confirm that it is paid").click()
    looked_at(ann, "payout-day-missing")
    ann.get_by_label("Paid on").fill(f"{timezone.now():%Y-%m-%d}")
    ann.get_by_role("button", name="Confirm that it is paid").click()
    expect(ann.get_by_text("The payout is paid.")).to_be_visible()
    ann.goto("/admin/ledger/payout/")
    looked_at(ann, "payouts-paid")
