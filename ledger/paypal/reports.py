"""What PayPal's own books say: every movement of our account there, and its balance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

from paypalserversdk.paypal_serversdk_client import PaypalServersdkClient

from ledger.paypal.api import ask

_PAGE = 100


@dataclass(frozen=True, slots=True)
class Movement:
    """One line of PayPal's transaction search. `gross` and `fee` are signed: above zero came to us.

    `code` is PayPal's event code, `reference_id` the transaction that this one is about, `invoice_id` ours.
    """

    external_id: str
    code: str
    currency: str
    gross: Decimal
    fee: Decimal
    reference_id: str
    invoice_id: str
    occurred_at: datetime


def read_movements(*, start: datetime, end: datetime) -> Iterator[Movement]:
    """What moved the balance within [start, end], at most 31 days, completed only.

    PayPal shows a transaction up to three hours late. Raises GatewayUnavailable and GatewayRefused.
    """
    page, pages = 1, 1
    while page <= pages:
        options = {
            "start_date": _text(start),
            "end_date": _text(end),
            "transaction_status": "S",
            "fields": "transaction_info",
            "balance_affecting_records_only": "Y",
            "page_size": _PAGE,
            "page": page,
        }
        answer = ask(partial(_search, options))
        for details in getattr(answer, "transaction_details", None) or []:
            yield _movement(details.transaction_info)
        pages = int(getattr(answer, "total_pages", None) or 1)
        page += 1


def _search(options: dict[str, Any], client: PaypalServersdkClient) -> Any:
    return client.transaction_search.search_transactions(options)


def read_balances(*, at: datetime) -> dict[str, Decimal]:
    """What PayPal has of ours then, by currency."""
    answer = ask(lambda client: client.transaction_search.search_balances({"as_of_time": _text(at)}))
    return {
        balance.currency: Decimal(balance.total_balance.value)
        for balance in getattr(answer, "balances", None) or []
    }


def _movement(info: Any) -> Movement:
    fee = getattr(info, "fee_amount", None)
    return Movement(
        external_id=info.transaction_id,
        code=getattr(info, "transaction_event_code", None) or "",
        currency=info.transaction_amount.currency_code,
        gross=Decimal(info.transaction_amount.value),
        fee=Decimal(fee.value) if fee else Decimal(0),
        reference_id=getattr(info, "paypal_reference_id", None) or "",
        invoice_id=getattr(info, "invoice_id", None) or getattr(info, "custom_field", None) or "",
        occurred_at=datetime.fromisoformat(info.transaction_initiation_date).astimezone(UTC),
    )


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
