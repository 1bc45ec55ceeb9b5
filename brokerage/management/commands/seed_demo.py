"""`manage.py seed_demo`: a model, two nodes, a clerk and a pilot customer to try Apex with."""

from __future__ import annotations

import json
import os
import secrets
from argparse import ArgumentParser, ArgumentTypeError
from decimal import Decimal, InvalidOperation
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from brokerage.models import APIKey, Customer, Member
from brokerage.services import catalogue, customers, keys
from brokerage.services.audit import record

CREDENTIALS_FILE = "demo-credentials.json"
ADMIN_EMAIL = "admin@apex.local"
PILOT_EMAIL = "pilot@acme.example"
COMPANY = "Acme Robotics"
KEY_NAME = "Demo key"
_ACTOR = "system:seed_demo"
_MILLION = 1_000_000
_SPOT_RATE, _STANDBY_RATE = Decimal("0.35"), Decimal("0.90")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number above zero, not {text!r}")
    return int(text)


def _price(text: str) -> Decimal:
    try:
        price = Decimal(text)
    except InvalidOperation:
        price = Decimal("NaN")
    if not price.is_finite() or price < 0:
        raise ArgumentTypeError(f"must be a price of zero or more, not {text!r}")
    return price


class Command(BaseCommand):
    help = (
        "Makes a served model with a price, its nodes, a staff user and a pilot customer with an API key."
        f" Safe to repeat: the log-ins are kept in var/{CREDENTIALS_FILE}."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--model", default="gemma-3-270m")
        parser.add_argument("--context", type=_count, default=2048, metavar="TOKENS")
        parser.add_argument("--prompt-price", type=_price, default=Decimal("0.20"), metavar="USD_PER_MILLION")
        parser.add_argument(
            "--completion-price", type=_price, default=Decimal("0.60"), metavar="USD_PER_MILLION"
        )
        parser.add_argument("--nodes", nargs="+", default=["node-a", "node-b"], metavar="NAME")
        parser.add_argument("--json", action="store_true", help="print the log-ins as JSON")
        parser.add_argument("--force", action="store_true", help="also on a database that DATABASE_URL names")

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.DEBUG_LOCAL and not options["force"]:
            raise CommandError(
                "seed_demo makes log-ins for everyone to see: it runs on the embedded servers only."
                " Add --force to do it on the database that DATABASE_URL names."
            )
        known = _read_credentials()
        with transaction.atomic():
            seeded = _seed(known, options)
        _write_credentials(seeded)
        if options["json"]:
            self.stdout.write(json.dumps(seeded, indent=2))
            return
        self.stdout.write(f"back office  {ADMIN_EMAIL}  {seeded['admin']['password']}")
        self.stdout.write(f"portal       {PILOT_EMAIL}  {seeded['pilot']['password']}")
        self.stdout.write(f"API key      {seeded['pilot']['api_key']}")


def _seed(known: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    model = catalogue.publish_model(name=options["model"], context_tokens=options["context"], actor=_ACTOR)
    catalogue.set_price(
        served_model=model,
        prompt_rate=options["prompt_price"] / _MILLION,
        completion_rate=options["completion_price"] / _MILLION,
        actor=_ACTOR,
    )
    for position, name in enumerate(options["nodes"]):
        # The first is the spot machine that traffic goes to, the others cost more and stand by.
        rate = _SPOT_RATE if position == 0 else _STANDBY_RATE
        catalogue.register_node(name=name, served_model=model, zone="local", hourly_rate=rate, actor=_ACTOR)

    admin, new = User.objects.get_or_create(
        username=ADMIN_EMAIL, defaults={"email": ADMIN_EMAIL, "is_staff": True, "is_superuser": True}
    )
    if new:
        record("staff.created", subject=admin, actor=_ACTOR)
    admin_password = _password(admin, known.get("admin", {}))
    customer = _customer(admin)
    owner = User.objects.get(username=PILOT_EMAIL)
    pilot = known.get("pilot", {})
    return {
        "admin": {"email": ADMIN_EMAIL, "password": admin_password},
        "pilot": {
            "email": PILOT_EMAIL,
            "password": _password(owner, pilot),
            "api_key": _api_key(customer, admin, pilot),
            "customer_id": str(customer.pk),
        },
        "model": model.name,
        "nodes": options["nodes"],
    }


def _password(user: User, known: dict[str, str]) -> str:
    password = known.get("password") or secrets.token_urlsafe(12)
    if not user.check_password(password):
        user.set_password(password)
        user.save(update_fields=["password"])
    return password


def _customer(admin: User) -> Customer:
    """Comes in by the front door like everybody: an application that staff approve."""
    member = Member.objects.select_related("customer").filter(user__username=PILOT_EMAIL).first()
    if member is not None:
        return member.customer
    application = customers.apply_for_pilot(
        name="Pat Pilot", email=PILOT_EMAIL, company=COMPANY, use_case="Robots that explain what they do."
    )
    approval = customers.approve_application(application=application, staff=admin)
    # Nobody was shown the key of the approval; the demo makes one that it remembers.
    for unseen in APIKey.objects.filter(customer=approval.customer):
        keys.revoke_key(key=unseen, actor=admin)
    return approval.customer


def _api_key(customer: Customer, admin: User, known: dict[str, str]) -> str:
    plaintext = known.get("api_key", "")
    parsed = keys.parse_key(plaintext)
    usable = APIKey.objects.filter(customer=customer, revoked_at__isnull=True)
    if parsed is not None and usable.filter(key_hash=parsed.digest).exists():
        return plaintext
    for lost in usable.filter(name=KEY_NAME):
        keys.revoke_key(key=lost, actor=admin)
    return keys.issue_key(customer=customer, name=KEY_NAME, actor=admin).plaintext


def _read_credentials() -> dict[str, Any]:
    try:
        return dict(json.loads((settings.VAR_DIR / CREDENTIALS_FILE).read_text()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CommandError(
            f"var/{CREDENTIALS_FILE} is not valid JSON: delete it and run seed_demo again"
        ) from error


def _write_credentials(credentials: dict[str, Any]) -> None:
    """Readable by its owner only, whole or not at all."""
    path = settings.VAR_DIR / CREDENTIALS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(credentials, file, indent=2)
    temporary.replace(path)
