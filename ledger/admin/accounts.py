"""Wallets and the platform's accounts, with everything that is known of one on its page."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import F, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from djmoney.money import Money

from ledger.admin.base import POSITION, BooksAdmin, may
from ledger.models import Account, CreditGrant, Hold, Proposal, Settlement
from ledger.money import format_money
from ledger.reports import debt_of, trial_balance
from ledger.selectors import account_balance, entries_page
from ledger.statement_files import FORMATS
from ledger.statements import Month, months_of, statement

_ENTRIES = 25
_NEWEST = 10


@admin.register(Account)
class AccountAdmin(BooksAdmin):
    change_form_template = "admin/ledger/account_change_form.html"
    change_list_template = "admin/ledger/account_change_list.html"
    list_display = ["code", "type", "currency", "posted", "held", "owner", "closed_at"]
    list_filter = ["type", "currency", "hot"]
    search_fields = ["code", "=owner"]
    fields = ["code", "type", "currency", "owner", "hot", "created_at", "closed_at"]
    empty_text = "No account yet. The first customer's wallet makes the first ones."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Account]:
        balances = {"kept_posted": F("balance__posted"), "kept_held": F("balance__held")}
        return super().get_queryset(request).annotate(**balances)

    @admin.display(description="posted (above zero: credit)")
    def posted(self, account: Account) -> str:
        return _plain(account.kept_posted)  # type: ignore[attr-defined]

    @admin.display(description="held")
    def held(self, account: Account) -> str:
        return _plain(account.kept_held)  # type: ignore[attr-defined]

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        own = [
            path("trial-balance/", view(self.trial_balance_view), name="ledger_trial_balance"),
            path(
                "<int:account_id>/statement/<str:month>.<statement_format:extension>",
                view(self.statement_view),
                name="ledger_statement",
            ),
        ]
        return [*own, *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        account = self.get_object(request, object_id)
        extra = _page(account, request) if account and self.has_view_permission(request, account) else {}
        return super().change_view(request, object_id, form_url, {**extra, **(extra_context or {})})

    def statement_view(
        self, request: HttpRequest, account_id: int, month: str, extension: str
    ) -> HttpResponse:
        account = self._viewable(request, account_id)
        try:
            found = statement(account=account, owner=account.code, month=Month.parse(month))
        except ValueError as error:
            raise Http404 from error
        content_type, render = FORMATS[extension]
        name = f"apex-statement-{account.pk}-{found.month}.{extension}"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return HttpResponse(render(found), content_type=content_type, headers=headers)

    def trial_balance_view(self, request: HttpRequest) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        asked, problem = request.GET.get("through", ""), ""
        through: date | None = None
        if asked:
            try:
                through = date.fromisoformat(asked)
            except ValueError:
                problem = f"“{asked[:20]}” is no date: write it like 2026-11-30."
        rows = trial_balance(through=through)
        totals = {
            currency: (
                sum((row.debit for row in rows if row.currency == currency), Decimal(0)),
                sum((row.credit for row in rows if row.currency == currency), Decimal(0)),
            )
            for currency in sorted({row.currency for row in rows})
        }
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": "Trial balance",
            "through": asked,
            "problem": problem,
            "today": datetime.now(UTC).date(),
            "rows": [
                {
                    "row": row,
                    "debit": _blank(row.debit, row.currency),
                    "credit": _blank(row.credit, row.currency),
                }
                for row in rows
            ],
            "totals": [
                {
                    "currency": currency,
                    "debit": format_money(Money(debit, currency)),
                    "credit": format_money(Money(credit, currency)),
                    "balanced": debit == credit,
                }
                for currency, (debit, credit) in totals.items()
            ],
        }
        return TemplateResponse(request, "admin/ledger/trial_balance.html", context)

    def _viewable(self, request: HttpRequest, account_id: int) -> Account:
        account = self.get_object(request, str(account_id))
        if account is None:
            raise Http404
        if not self.has_view_permission(request, account):
            raise PermissionDenied
        return account


def _page(account: Account, request: HttpRequest) -> dict[str, Any]:
    """What the account's page shows below its fields: a fixed number of queries, whatever its age."""

    def money(amount: Decimal | None) -> str:
        return "no limit" if amount is None else format_money(Money(amount, account.currency))

    balance = getattr(account, "balance", None) if not account.hot else None
    position = request.GET.get(POSITION, "")
    before = int(position) if position.isascii() and position.isdigit() and len(position) <= 18 else None
    entries = entries_page(account_id=account.pk, before=before, limit=_ENTRIES)
    debt = debt_of(account) if balance else Decimal(0)
    if balance:
        available = None if balance.floor is None else balance.posted - balance.held - balance.floor
        figures = [
            ("posted", money(balance.posted)),
            ("held", money(balance.held)),
            ("available", money(available)),
            ("owed by its owner", money(debt)),
        ]
    else:
        figures = [("balance", money(account_balance(account)))]
    return {
        "figures": figures,
        "is_wallet": balance is not None,
        "entries": [
            {
                "row": entry,
                "amount": format_money(Money(entry.amount, entry.currency)),
                "balance": format_money(Money(entry.balance, entry.currency)),
            }
            for entry in entries.entries
        ],
        "older": entries.next_cursor,
        "is_first": before is None,
        "holds": [
            {"row": hold, "amount": money(hold.amount.amount)}
            for hold in Hold.objects.filter(account=account, state=Hold.State.OPEN)[:_NEWEST]
        ],
        "grants": [
            {
                "kind": grant.kind,
                "amount": money(grant.amount.amount),
                "left": money(grant.remaining),
                "expires_at": grant.expires_at,
            }
            for grant in CreditGrant.objects.filter(account=account, remaining__gt=0)[:_NEWEST]
        ],
        "settlements": [
            {"row": row, "gross": money(row.gross.amount), "fee": money(row.fee)}
            for row in Settlement.objects.filter(account=account)[:_NEWEST]
        ],
        "proposals": list(Proposal.objects.filter(account=account)[:_NEWEST]),
        "months": months_of(account)[:12] if balance else [],
        "may_propose": may(request, "add", Proposal),
        "more_kinds": [
            (kind.value, kind.label)
            for kind in (Proposal.Kind.GRANT, *([Proposal.Kind.WRITE_OFF] if debt else []))
        ],
    }


def _plain(amount: Decimal | None) -> str:
    return "—" if amount is None else f"{amount.normalize():f}"


def _blank(amount: Decimal, currency: str) -> str:
    return format_money(Money(amount, currency)) if amount else ""
