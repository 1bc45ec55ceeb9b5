"""The forms of proposals: what to do, to which part of the books, and why."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from django import forms
from djmoney.money import Money

from ledger.models import Account, Journal, Proposal, Settlement
from ledger.models.fields import DECIMAL_PLACES, MAX_DIGITS
from ledger.models.proposals import REASON_MIN
from ledger.money import format_money
from ledger.payouts import BILL_SCOPE, owed_to_payees
from ledger.paypal.disputes import gone_back
from ledger.proposals.kinds import COUNTER_ACCOUNTS, GRANT_KINDS
from ledger.reports import debt_of


class ProposalForm(forms.Form):
    """A form per kind. When valid, `terms()` is what `proposals.services.propose` takes."""

    kind: Proposal.Kind
    intro: str

    def terms(self) -> dict[str, Any]:
        raise NotImplementedError


def _reason() -> forms.CharField:
    return forms.CharField(
        min_length=REASON_MIN,
        max_length=1000,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="Why, for those who read the books in five years: the ticket, the mail, the agreement.",
    )


def _amount(**options: Any) -> forms.DecimalField:
    return forms.DecimalField(max_digits=MAX_DIGITS, decimal_places=DECIMAL_PLACES, **options)


class WalletField(forms.CharField):
    """The code of an account that has a balance row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=120, help_text="The wallet's code, like customer_credit:…", **options)

    def clean(self, value: Any) -> Account:
        code = super().clean(value).strip()
        account = Account.objects.filter(code=code, hot=False).select_related("balance").first()
        if account is None:
            raise forms.ValidationError(f"There is no wallet “{code[:60]}”.")
        if account.closed_at:
            raise forms.ValidationError(f"“{code[:60]}” is closed.")
        return account


class AdjustmentForm(ProposalForm):
    kind = Proposal.Kind.ADJUSTMENT
    intro = "Puts credit into a wallet or takes it out, against an account of the platform."

    wallet = WalletField()
    amount = _amount(help_text="Above zero: the customer gets it. Below zero: it is taken from the wallet.")
    counter = forms.ChoiceField(
        label="Against", choices=list(COUNTER_ACCOUNTS.items()), help_text="Where the other leg is booked."
    )
    reason = _reason()

    def clean_amount(self) -> Decimal:
        if self.cleaned_data["amount"] == 0:
            raise forms.ValidationError("Zero moves nothing.")
        return self.cleaned_data["amount"]

    def terms(self) -> dict[str, Any]:
        wallet, amount = self.cleaned_data["wallet"], self.cleaned_data["amount"]
        counter = self.cleaned_data["counter"]
        money = Money(amount, wallet.currency)
        return {
            "summary": f"{format_money(money)} on {wallet.code} against {counter}",
            "payload": {"counter": counter},
            "account": wallet,
            "amount": money,
            "reason": self.cleaned_data["reason"],
        }


class ReversalForm(ProposalForm):
    kind = Proposal.Kind.REVERSAL
    intro = "Takes a journal back by a new one with the opposite legs, dated today. Once per journal."

    journal = forms.IntegerField(min_value=1, help_text="The journal's number.")
    reason = _reason()

    def clean_journal(self) -> Journal:
        number = self.cleaned_data["journal"]
        journal = Journal.objects.filter(pk=number).first()
        if journal is None:
            raise forms.ValidationError(f"There is no journal {number}.")
        if journal.reverses_id:
            raise forms.ValidationError("It is a reversal itself. Propose an adjustment instead.")
        if Journal.objects.filter(reverses=journal).exists():
            raise forms.ValidationError("It is reversed already.")
        return journal

    def terms(self) -> dict[str, Any]:
        journal: Journal = self.cleaned_data["journal"]
        legs = list(journal.entries.all())
        moved = sum((leg.amount.amount for leg in legs if leg.amount.amount > 0), Decimal(0))
        wallets = Account.objects.filter(pk__in=[leg.account_id for leg in legs], hot=False)
        money = Money(moved, journal.currency)
        return {
            "summary": f"journal {journal.pk} ({journal.kind}, {format_money(money)})",
            "payload": {"journal": journal.pk},
            "account": wallets.first(),
            "amount": money,
            "reason": self.cleaned_data["reason"],
        }


class GrantForm(ProposalForm):
    kind = Proposal.Kind.GRANT
    intro = "Gives credit with terms of its own. It is drawn on before what the customer paid for."

    wallet = WalletField()
    grant = forms.ChoiceField(label="Kind", choices=list(GRANT_KINDS.items()))
    amount = _amount(min_value=Decimal("0.000000001"))
    expires_on = forms.DateField(
        label="Good through",
        required=False,
        widget=forms.DateInput(attrs={"type": "date"}),
        help_text="The last day (UTC) on which it can be used. Empty: it does not expire.",
    )
    reason = _reason()

    def clean_expires_on(self) -> date | None:
        day: date | None = self.cleaned_data["expires_on"]
        if day is not None and day < datetime.now(UTC).date():
            raise forms.ValidationError("That day is over.")
        return day

    def terms(self) -> dict[str, Any]:
        wallet, day = self.cleaned_data["wallet"], self.cleaned_data["expires_on"]
        money = Money(self.cleaned_data["amount"], wallet.currency)
        kind = self.cleaned_data["grant"]
        ends = datetime.combine(day + timedelta(days=1), time.min, UTC) if day else None
        until = f", good through {day}" if day else ""
        return {
            "summary": f"{format_money(money)} of {kind} credit to {wallet.code}{until}",
            "payload": {"grant": kind, "expires_at": ends and ends.isoformat()},
            "account": wallet,
            "amount": money,
            "reason": self.cleaned_data["reason"],
        }


class WriteOffForm(ProposalForm):
    kind = Proposal.Kind.WRITE_OFF
    intro = "Gives up what the owner of a wallet owes, or a part of it. It becomes an expense."

    wallet = WalletField()
    amount = _amount(min_value=Decimal("0.000000001"), help_text="Not more than is owed.")
    reason = _reason()

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if "wallet" in cleaned and "amount" in cleaned:
            owed = debt_of(cleaned["wallet"])
            if cleaned["amount"] > owed:
                money = format_money(Money(owed, cleaned["wallet"].currency))
                self.add_error("amount", f"Only {money} is owed.")
        return cleaned

    def terms(self) -> dict[str, Any]:
        wallet = self.cleaned_data["wallet"]
        money = Money(self.cleaned_data["amount"], wallet.currency)
        return {
            "summary": f"{format_money(money)} owed by {wallet.code}",
            "payload": {},
            "account": wallet,
            "amount": money,
            "reason": self.cleaned_data["reason"],
        }


class RefundForm(ProposalForm):
    kind = Proposal.Kind.REFUND
    intro = "Sends money of a purchase back to its payer through PayPal, all of it or a part."

    capture = forms.CharField(
        max_length=64, help_text="PayPal's id of the capture, as on the settlement's page."
    )
    amount = forms.DecimalField(max_digits=12, decimal_places=2, min_value=Decimal("0.01"))
    allow_debt = forms.BooleanField(
        label="Even if the credit is spent",
        required=False,
        help_text="What the wallet has not got any more becomes the customer's debt.",
    )
    reason = _reason()

    def clean_capture(self) -> Settlement:
        external_id = self.cleaned_data["capture"].strip()
        capture = (
            Settlement.objects.filter(provider="paypal", kind="capture", external_id=external_id)
            .select_related("account")
            .first()
        )
        if capture is None:
            raise forms.ValidationError(f"No capture “{external_id}” is booked.")
        return capture

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if "capture" in cleaned and "amount" in cleaned:
            capture = cleaned["capture"]
            left = capture.gross.amount - gone_back(provider="paypal", capture_id=capture.external_id)
            if cleaned["amount"] > left:
                self.add_error(
                    "amount", f"Only {format_money(Money(left, capture.gross.currency))} is left of it."
                )
        return cleaned

    def terms(self) -> dict[str, Any]:
        capture: Settlement = self.cleaned_data["capture"]
        money = Money(self.cleaned_data["amount"], capture.gross.currency)
        return {
            "summary": f"{format_money(money)} of capture {capture.external_id}",
            "payload": {"capture": capture.external_id, "allow_debt": self.cleaned_data["allow_debt"]},
            "account": capture.account,
            "amount": money,
            "reason": self.cleaned_data["reason"],
        }


class _PeriodForm(ProposalForm):
    through = forms.DateField(
        widget=forms.DateInput(attrs={"type": "date"}), help_text="The last day that is closed (UTC)."
    )
    reason = _reason()

    def clean_through(self) -> date:
        day: date = self.cleaned_data["through"]
        if day >= datetime.now(UTC).date():
            raise forms.ValidationError("That day is not over yet in UTC.")
        return day

    def terms(self) -> dict[str, Any]:
        day = self.cleaned_data["through"]
        return {
            "summary": f"through {day}",
            "payload": {"through": str(day)},
            "reason": self.cleaned_data["reason"],
        }


class BillForm(ProposalForm):
    kind = Proposal.Kind.BILL
    intro = "Books what a provider of compute has billed: from then on we owe it, and a payout can pay it."

    payee = forms.CharField(max_length=120, help_text="As it is written on payouts, such as RunPod Inc.")
    number = forms.CharField(max_length=60, label="Number", help_text="Of the bill. Each is booked once.")
    amount = _amount(min_value=Decimal("0.01"))
    currency = forms.RegexField("^[A-Z]{3}$", initial="USD", help_text="Three capital letters.")
    reason = _reason()

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if {"payee", "number"} <= cleaned.keys():
            key = f"{cleaned['payee']}:{cleaned['number']}"
            if Journal.objects.filter(idem_scope=BILL_SCOPE, idem_key=key).exists():
                self.add_error("number", f"Bill {cleaned['number']} of {cleaned['payee']} is booked already.")
        return cleaned

    def terms(self) -> dict[str, Any]:
        payee, number = self.cleaned_data["payee"], self.cleaned_data["number"]
        money = Money(self.cleaned_data["amount"], self.cleaned_data["currency"])
        return {
            "summary": f"bill {number} of {payee}, {format_money(money)}",
            "payload": {"payee": payee, "number": number},
            "amount": money,
            "reason": self.cleaned_data["reason"],
        }


class PayoutForm(ProposalForm):
    kind = Proposal.Kind.PAYOUT
    intro = "Writes down a bank transfer to a provider. It is booked when the bank's statement shows it."

    payee = forms.CharField(
        max_length=120, help_text="Who has billed us; the payouts' page tells what is owed."
    )
    amount = _amount(min_value=Decimal("0.01"))
    currency = forms.RegexField("^[A-Z]{3}$", initial="USD", help_text="Three capital letters.")
    reason = _reason()

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if {"payee", "amount", "currency"} <= cleaned.keys():
            owed = [each for each in owed_to_payees() if each.payee == cleaned["payee"]]
            left = sum((each.left for each in owed if each.currency == cleaned["currency"]), Decimal(0))
            if not owed:
                self.add_error("payee", "Nobody of this name has billed us. Book the bill first.")
            elif cleaned["amount"] > left:
                told = format_money(Money(left, cleaned["currency"]))
                self.add_error("amount", f"That is more than the {told} that we owe and have not sent.")
        return cleaned

    def terms(self) -> dict[str, Any]:
        payee = self.cleaned_data["payee"]
        money = Money(self.cleaned_data["amount"], self.cleaned_data["currency"])
        return {
            "summary": f"{format_money(money)} to {payee}",
            "payload": {"payee": payee},
            "amount": money,
            "reason": self.cleaned_data["reason"],
        }


class ClosePeriodForm(_PeriodForm):
    kind = Proposal.Kind.CLOSE_PERIOD
    intro = "After it no journal can be dated on that day or before. Corrections go to the open period."


class ReopenPeriodForm(_PeriodForm):
    kind = Proposal.Kind.REOPEN_PERIOD
    intro = "Opens every day after that one again."


FORMS: dict[str, type[ProposalForm]] = {
    form.kind.value: form
    for form in (
        AdjustmentForm,
        GrantForm,
        WriteOffForm,
        ReversalForm,
        RefundForm,
        BillForm,
        PayoutForm,
        ClosePeriodForm,
        ReopenPeriodForm,
    )
}
