"""How somebody becomes a customer: apply, be approved or declined, join."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models.functions import Lower, Now

from brokerage.models import Customer, Member, PilotApplication
from brokerage.services.audit import record
from brokerage.services.invitations import Invitation, invite
from brokerage.services.keys import issue_key
from ledger.services import open_wallet


class AlreadyDecided(Exception):
    """Another clerk was first; the message says what was decided."""


@dataclass(frozen=True, slots=True)
class Approval:
    """What the clerk sees once: `api_key_plaintext` is stored nowhere."""

    customer: Customer
    user: User
    invitation: Invitation
    api_key_plaintext: str = field(repr=False)


@transaction.atomic
def apply_for_pilot(*, name: str, email: str, company: str, use_case: str) -> PilotApplication:
    """The open application of that address: a double click makes no second one.

    Raises ValidationError, keyed by field.
    """
    application = PilotApplication(
        name=name.strip(), email=email.strip().lower(), company=company.strip(), use_case=use_case.strip()
    )
    application.clean_fields(exclude={"created_at"})
    # The constraint application_open_once decides, so two clicks at once are two clicks in a row.
    PilotApplication.objects.bulk_create([application], ignore_conflicts=True)
    mine = PilotApplication.objects.filter(pk=application.pk).first()
    if mine is not None:
        record("pilot.applied", subject=mine, actor="public", company=mine.company)
        return mine
    same_address = PilotApplication.objects.alias(address=Lower("email")).filter(address=application.email)
    return same_address.latest("created_at")


@transaction.atomic
def approve_application(*, application: PilotApplication, staff: User) -> Approval:
    """Makes the customer with wallet, owner, first API key and invitation. Raises AlreadyDecided."""
    customer = Customer(id=uuid.uuid4(), name=application.company)
    # First the decision, under the row's lock; its foreign key is checked when the transaction ends.
    _decide(application, PilotApplication.State.APPROVED, staff, customer=customer)
    customer.save(force_insert=True)
    open_wallet(code=customer.wallet_code, owner=str(customer.pk), currency=customer.currency)
    user = _user_for(application.email, application.name)
    Member.objects.create(customer=customer, user=user, role=Member.Role.OWNER)
    issued = issue_key(customer=customer, name="First key", actor=staff)
    invitation = invite(user=user, customer=customer)
    record("pilot.approved", subject=application, actor=staff, customer=str(customer.pk))
    return Approval(customer, user, invitation, issued.plaintext)


@transaction.atomic
def decline_application(*, application: PilotApplication, staff: User) -> None:
    """Raises AlreadyDecided."""
    _decide(application, PilotApplication.State.DECLINED, staff)
    record("pilot.declined", subject=application, actor=staff)


def _decide(
    application: PilotApplication,
    state: PilotApplication.State,
    staff: User,
    *,
    customer: Customer | None = None,
) -> None:
    decided = PilotApplication.objects.filter(pk=application.pk, state=PilotApplication.State.NEW).update(
        state=state, customer_id=customer and customer.pk, decided_at=Now(), decided_by=staff
    )
    application.refresh_from_db(fields=["state", "decided_at", "decided_by"])
    if not decided:
        raise AlreadyDecided(f"{application.company} was {application.get_state_display().lower()} already")


@transaction.atomic
def add_member(
    *, customer: Customer, email: str, actor: User, name: str = "", role: Member.Role = Member.Role.MEMBER
) -> Member:
    """The member with that address, invited when new. A second call changes nothing, not even the role."""
    user = _user_for(email, name)
    member, new = Member.objects.get_or_create(customer=customer, user=user, defaults={"role": role})
    if new:
        invite(user=user, customer=customer)
        record("member.added", subject=customer, actor=actor, user=user.get_username(), role=role.value)
    return member


@transaction.atomic
def suspend_customer(*, customer: Customer, actor: User) -> bool:
    """None of its keys works any more, within a second. True when this call did it."""
    suspended = Customer.objects.filter(pk=customer.pk, suspended_at__isnull=True).update(suspended_at=Now())
    if suspended:
        record("customer.suspended", subject=customer, actor=actor)
    return bool(suspended)


@transaction.atomic
def reinstate_customer(*, customer: Customer, actor: User) -> bool:
    """Takes a suspension back. True when there was one."""
    reinstated = Customer.objects.filter(pk=customer.pk, suspended_at__isnull=False).update(suspended_at=None)
    if reinstated:
        record("customer.reinstated", subject=customer, actor=actor)
    return bool(reinstated)


def _user_for(email: str, name: str) -> User:
    """One user per address; the unique user name decides between two calls at once."""
    address = email.strip().lower()
    first, _, last = name.strip().partition(" ")
    user, new = User.objects.get_or_create(
        username=address, defaults={"email": address, "first_name": first[:150], "last_name": last[:150]}
    )
    if new:
        user.set_unusable_password()
        user.save(update_fields=["password"])
    return user
