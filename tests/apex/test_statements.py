"""Statements as customers get them."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from ledger.models import Account
from ledger.services import Line, platform_account, post_journal
from tests.apex.conftest import Team

pytestmark = pytest.mark.django_db
MONTH = f"{datetime.now(UTC):%Y-%m}"


@pytest.fixture
def paid(acme: Team) -> Team:
    wallet = Account.objects.get(code=acme.customer.wallet_code)
    bank = platform_account(code="bank", currency="USD")
    post_journal(
        scope="test", key="paid", kind="top_up", currency="USD", actor="test",
        lines=[Line(wallet.pk, Decimal(12)), Line(bank.pk, Decimal(-12))],
    )  # fmt: skip
    return acme


def test_the_api_lists_months_and_tells_each(paid):
    listed = paid.api().get("/v1/statements").json()["results"]
    assert listed == [{"month": MONTH, "final": False}]
    told = paid.api().get(f"/v1/statements/{MONTH}").json()
    assert told["opening"]["amount"] == "0.000000000"
    assert told["closing"] == {"amount": "12.000000000", "currency": "USD"}
    assert [line["kind"] for line in told["lines"]] == ["top_up"]


@pytest.mark.parametrize(("extension", "begins"), [("csv", b"date,kind,"), ("pdf", b"%PDF-")])
def test_files_come_from_the_api_and_the_portal_alike(paid, extension, begins):
    for answer in (
        paid.api().get(f"/v1/statements/{MONTH}.{extension}"),
        paid.portal().get(f"/portal/statement/{MONTH}.{extension}"),
    ):
        assert answer.status_code == 200
        assert answer.content.startswith(begins)
        assert f"apex-statement-{MONTH}.{extension}" in answer["Content-Disposition"]
        assert answer["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("month", ["2026-13", "9999-01", "now"])
def test_a_month_that_is_none_is_told_why(paid, month):
    answer = paid.api().get(f"/v1/statements/{month}")
    assert answer.status_code == 404
    assert "month" in answer.json()["detail"] or "begun" in answer.json()["detail"]
    assert paid.portal().get(f"/portal/statement/{month}.pdf").status_code == 404


def test_the_portal_leads_to_both_files(paid):
    page = paid.portal().get("/portal/statement/").content.decode()
    assert f"/portal/statement/{MONTH}.pdf" in page
    assert f"/portal/statement/{MONTH}.csv" in page
