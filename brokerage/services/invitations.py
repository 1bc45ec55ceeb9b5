"""The mail that lets a new person set a password. Django's own one-time link, sent after the commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.auth.tokens import default_token_generator
from django.core.mail import send_mail
from django.db import transaction
from django.shortcuts import resolve_url
from django.urls import reverse
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_encode

from brokerage.models import Customer

_TEXT = """\
Hello,

you can now use Apex for {customer}.
{what}:

{url}

{note}"""


@dataclass(frozen=True, slots=True)
class Invitation:
    """`url` sets a password and works once, so it is a secret; for who has a password it is the sign-in."""

    email: str
    url: str = field(repr=False)


def invite(*, user: User, customer: Customer) -> Invitation:
    """Mails the link when the transaction commits. A mail server that is down undoes nothing."""
    if user.has_usable_password():
        path = resolve_url(settings.LOGIN_URL)
        what, note = "Sign in with the password that you have", ""
    else:
        uid = urlsafe_base64_encode(force_bytes(user.pk))
        token = default_token_generator.make_token(user)
        path = reverse("password_reset_confirm", kwargs={"uidb64": uid, "token": token})
        days = settings.PASSWORD_RESET_TIMEOUT // 86_400
        what, note = "Set your password here", f"The link works once, within {days} days.\n"
    invitation = Invitation(user.email, settings.PUBLIC_URL + path)
    text = _TEXT.format(customer=customer.name, what=what, url=invitation.url, note=note)
    subject = " ".join(f"Your access to Apex for {customer.name}".split())

    def send() -> None:
        send_mail(subject, text, None, [user.email])

    transaction.on_commit(send, robust=True)
    return invitation
