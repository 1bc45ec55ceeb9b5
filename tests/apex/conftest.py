"""What the tests of the site share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.contrib.auth.models import User
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.test import Client

from brokerage.models import APIKey, Customer, Member, ModelPrice, ServedModel, UsageEvent
from brokerage.services.keys import issue_key
from ledger.services import open_wallet


@pytest.fixture(autouse=True)
def plain_static_files(settings):
    """Hashed names need collectstatic first; test_static_files checks that once for all."""
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    }


@pytest.fixture(autouse=True)
def quick_passwords(settings):
    """The real hash is slow on purpose, which tests of other things need not wait for."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@dataclass
class Team:
    """A customer with one person and one key, and clients that act for each."""

    customer: Customer
    user: User
    key: APIKey
    secret: str

    def portal(self) -> Client:
        client = Client()
        client.force_login(self.user)
        return client

    def api(self) -> Client:
        return Client(headers={"authorization": f"Bearer {self.secret}"})


def make_team(name: str) -> Team:
    customer = Customer.objects.create(name=name)
    open_wallet(code=customer.wallet_code, owner=str(customer.pk), currency=customer.currency)
    user = User.objects.create_user(
        f"{name.lower()}@example.com", f"{name.lower()}@example.com", "correct horse 7"
    )
    Member.objects.create(customer=customer, user=user, role=Member.Role.OWNER)
    issued = issue_key(customer=customer, name=f"{name}'s key", actor=user)
    return Team(customer, user, issued.key, issued.plaintext)


def make_usage(team: Team, *, minutes_ago: int = 5, **fields: object) -> UsageEvent:
    """An answer of 12 + 30 tokens that nobody has charged yet."""
    model, _ = ServedModel.objects.get_or_create(name="gemma-test", defaults={"context_tokens": 2048})
    price = ModelPrice.objects.filter(served_model=model).first() or ModelPrice.objects.create(
        served_model=model,
        prompt_rate=Decimal("0.000000250000"),
        completion_rate=Decimal("0.000001000000"),
        valid=DateTimeTZRange(datetime(2026, 1, 1, tzinfo=UTC), None, "[)"),
    )
    finished = datetime.now(UTC) - timedelta(minutes=minutes_ago)
    defaults = {
        "customer": team.customer,
        "api_key": team.key,
        "served_model": model,
        "price": price,
        "outcome": "completed",
        "prompt_tokens": 12,
        "completion_tokens": 30,
        "started_at": finished - timedelta(seconds=2),
        "finished_at": finished,
        "currency": "USD",
    }
    return UsageEvent.objects.create(**defaults | fields)


@pytest.fixture
def acme(db, redis_client) -> Team:
    return make_team("Acme")


@pytest.fixture
def other(db, redis_client) -> Team:
    """Somebody else's team: whatever Acme does must not reach it."""
    return make_team("Other")
