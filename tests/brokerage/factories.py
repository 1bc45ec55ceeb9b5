"""The smallest real rows that a test can start from."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar

from django.contrib.auth.models import User
from django.db import connections
from djmoney.money import Money

from brokerage.models import APIKey, Customer, ModelPrice, Node, ServedModel, UsageEvent
from brokerage.services.catalogue import set_price
from brokerage.services.keys import issue_key
from ledger.models import Account, AuditEvent
from ledger.selectors import wallet
from ledger.services import Line, create_hold, open_wallet, platform_account, post_journal

TOKENIZER = "a" * 64
T = TypeVar("T")


def audit_actions() -> list[str]:
    return list(AuditEvent.objects.order_by("id").values_list("action", flat=True))


def make_staff(name: str = "clerk") -> User:
    return User.objects.create_superuser(f"{name}@apex.local", f"{name}@apex.local", "not a real password")


def make_customer(*, credit: str = "0", name: str = "Engines") -> Customer:
    customer = Customer.objects.create(name=name)
    open_wallet(code=customer.wallet_code, owner=str(customer.pk), currency=customer.currency)
    if Decimal(credit):
        give_credit(customer, credit)
    return customer


def give_credit(customer: Customer, amount: str) -> None:
    purse = wallet(customer.wallet_code)
    source = platform_account(code="promo_deferred", currency=purse.currency)
    post_journal(
        scope="test",
        key=str(uuid.uuid4()),
        kind="gift",
        currency=purse.currency,
        lines=[Line(purse.account_id, Decimal(amount)), Line(source.pk, -Decimal(amount))],
        actor="test",
    )


def open_hold(customer: Customer, amount: str, *, key: str) -> int:
    """The id of a hold as the gateway makes it."""
    account = Account.objects.get(code=customer.wallet_code)
    money = Money(Decimal(amount), account.currency)
    return create_hold(
        account=account, amount=money, key=key, ttl=timedelta(minutes=15), actor="test"
    ).hold_id


def make_model(name: str = "gemma", *, context_tokens: int = 2048) -> ServedModel:
    model, _ = ServedModel.objects.get_or_create(name=name, defaults={"context_tokens": context_tokens})
    return model


def make_price(model: ServedModel, *, prompt: str = "0.0000002", completion: str = "0.0000006") -> ModelPrice:
    return set_price(
        served_model=model, prompt_rate=Decimal(prompt), completion_rate=Decimal(completion), actor="test"
    )


def make_node(name: str, **fields: Any) -> Node:
    return Node.objects.create(name=name, served_model=make_model(), **fields)


def make_key(customer: Customer) -> tuple[APIKey, str]:
    issued = issue_key(customer=customer, name="test", actor=None)
    return issued.key, issued.plaintext


def make_usage(customer: Customer, price: ModelPrice, **fields: Any) -> UsageEvent:
    """A finished answer as the gateway stores it, not charged yet."""
    key = customer.api_keys.first() or make_key(customer)[0]
    moment = datetime(2026, 12, 1, 10, 0, tzinfo=UTC)
    defaults = {
        "request_id": uuid.uuid4(),
        "outcome": "completed",
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "started_at": moment,
        "finished_at": moment,
        "currency": price.currency,
    }
    return UsageEvent.objects.create(
        customer=customer, api_key=key, served_model=price.served_model, price=price, **(defaults | fields)
    )


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Runs `work` in that many threads at once, each with its own connection. Raises what they raise."""

    def run(number: int) -> T:
        try:
            return work(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
