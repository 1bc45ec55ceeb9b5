"""A customer's monthly statements, for the portal and the API."""

from __future__ import annotations

from django.http import HttpResponse

from brokerage.models import Customer
from ledger.models import Account
from ledger.statement_files import FORMATS
from ledger.statements import Month, Statement, months_of, statement


class StatementFormat:
    """The files that a statement comes as, in addresses."""

    regex = "|".join(FORMATS)

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: str) -> str:
        return value


def statement_months(customer: Customer) -> list[Month]:
    """Newest first; the first of them is not over yet."""
    return months_of(_wallet(customer))


def statement_of(customer: Customer, month: str) -> Statement:
    """Raises ValueError, with words for people, for what is no month or has not begun."""
    return statement(account=_wallet(customer), owner=customer.name, month=Month.parse(month))


def as_download(found: Statement, extension: str) -> HttpResponse:
    """The statement as a file of that kind, one of FORMATS."""
    content_type, render = FORMATS[extension]
    headers = {"Content-Disposition": f'attachment; filename="apex-statement-{found.month}.{extension}"'}
    return HttpResponse(render(found), content_type=content_type, headers=headers)


def _wallet(customer: Customer) -> Account:
    return Account.objects.get(code=customer.wallet_code)
