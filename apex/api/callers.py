"""Who calls the API: a program with a key, or a person whose browser is signed in to the portal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.db.models import Q
from django.db.models.functions import Now
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from apex.portal.scope import current_customer
from brokerage.models import APIKey, Customer
from brokerage.services.keys import parse_key

_BEARER = re.compile(r"Bearer +(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Caller:
    """`request.auth`. Everything that is read or written is the customer's; `key` or `user` says who asked."""

    customer: Customer | None
    key: APIKey | None = None
    user: User | None = None

    @property
    def scope(self) -> str:
        """Names the caller for limits and idempotency."""
        return f"key:{self.key.pk}" if self.key else f"user:{self.user.pk if self.user else None}"


class KeyUser:
    """`request.user` of a program: signed in, but no person."""

    is_authenticated = is_active = True
    is_anonymous = is_staff = is_superuser = False
    pk = None


class BearerKey(BaseAuthentication):
    """`Authorization: Bearer apx_...`. Answers 401 with the same words for every kind of wrong key."""

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="apex"'

    def authenticate(self, request: Request) -> tuple[Any, Any] | None:
        header = request.headers.get("Authorization")
        if header is None:
            return None
        match = _BEARER.fullmatch(header.strip())
        parsed = parse_key(match[1]) if match else None
        key = parsed and (
            APIKey.objects.select_related("customer")
            .filter(Q(expires_at__isnull=True) | Q(expires_at__gt=Now()))
            .filter(key_hash=parsed.digest, revoked_at__isnull=True, customer__suspended_at__isnull=True)
            .first()
        )
        if not key:
            raise AuthenticationFailed(
                "The API key is unknown, revoked or malformed. Send it as “Authorization: Bearer apx_…”."
            )
        return KeyUser(), Caller(customer=key.customer, key=key)


class PortalSession(SessionAuthentication):
    """The portal's cookie, with Django's CSRF check on everything that writes."""

    def authenticate(self, request: Request) -> tuple[Any, Any] | None:
        signed_in = super().authenticate(request)
        if signed_in is None:
            return None
        user, _ = signed_in
        return user, Caller(customer=current_customer(request._request), user=user)


class IsCustomer(BasePermission):
    """A key has a customer; a person may have none yet."""

    message = "You belong to no team yet, so there is nothing to read or write."

    def has_permission(self, request: Request, view: APIView) -> bool:
        return isinstance(request.auth, Caller) and request.auth.customer is not None


def customer_of(request: Request) -> Customer:
    """For views behind IsCustomer."""
    assert isinstance(request.auth, Caller)
    assert request.auth.customer is not None
    return request.auth.customer
