"""Who uses Apex: customers, the people of a customer, their applications and API keys."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q
from django.db.models.functions import Lower, Now


class Customer(models.Model):
    """A team that buys compute. Its wallet is a ledger account, named by `wallet_code`."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=200)
    currency = models.CharField(max_length=3, default="USD")
    time_zone = models.CharField(
        max_length=64, default="UTC", help_text="IANA name. Days and months of budgets begin at its midnight."
    )
    suspended_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def wallet_code(self) -> str:
        return f"customer_credit:{self.id}"


class Member(models.Model):
    """A person who may act for a customer."""

    class Role(models.TextChoices):
        OWNER = "owner"
        MEMBER = "member"

    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="members")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="memberships")
    role = models.CharField(max_length=20, choices=Role, default=Role.MEMBER)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["customer", "user"], name="member_once")]

    def __str__(self) -> str:
        return f"{self.user} of {self.customer}"


class PilotApplication(models.Model):
    """A request from the landing page. Staff approve it once; approval makes the customer."""

    class State(models.TextChoices):
        NEW = "new"
        APPROVED = "approved"
        DECLINED = "declined"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField("your name", max_length=200)
    email = models.EmailField(max_length=150)  # becomes the name of the user, which has 150 characters
    company = models.CharField(max_length=200)
    use_case = models.TextField("what will you run?", max_length=2000)
    state = models.CharField(max_length=20, choices=State, default=State.NEW, editable=False)
    customer = models.ForeignKey(Customer, null=True, blank=True, editable=False, on_delete=models.PROTECT)
    decided_at = models.DateTimeField(null=True, blank=True, editable=False)
    decided_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, editable=False, on_delete=models.PROTECT
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            # One open application per address; a double click makes no second one.
            models.UniqueConstraint(Lower("email"), condition=Q(state="new"), name="application_open_once"),
            models.CheckConstraint(
                condition=Q(state="approved", customer__isnull=False)
                | (~Q(state="approved") & Q(customer__isnull=True)),
                name="application_customer_iff_approved",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.company} ({self.email})"


class APIKey(models.Model):
    """A bearer key. Only its SHA-256 is kept: the key has 190 random bits, so no slow hash is needed.

    `last_used_at` is written with the charge, so it lags by seconds and costs the request nothing.
    """

    class Mode(models.TextChoices):
        LIVE = "live"
        TEST = "test"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="api_keys")
    # For life. The database puts the customer's default one here when a key is made without.
    project = models.ForeignKey(
        "brokerage.Project", on_delete=models.PROTECT, related_name="api_keys", editable=False
    )
    name = models.CharField(max_length=100)
    mode = models.CharField(max_length=4, choices=Mode, default=Mode.LIVE)
    key_hash = models.BinaryField(max_length=32, unique=True, editable=False)
    last4 = models.CharField(max_length=4, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, editable=False, on_delete=models.PROTECT
    )
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    # Empty is no limit. Kept by the gateways, over all of them together (admission/limits.py).
    requests_per_minute = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)]
    )
    tokens_per_minute = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)], help_text="Prompt and answer together."
    )
    concurrent_answers = models.PositiveIntegerField(
        "answers at a time", null=True, blank=True, validators=[MinValueValidator(1)]
    )

    class Meta:
        ordering = ["-created_at"]
        verbose_name = "API key"
        constraints = [
            # Zero would be read as no limit: a key that may do nothing is revoked instead.
            models.CheckConstraint(
                condition=~Q(requests_per_minute=0) & ~Q(tokens_per_minute=0) & ~Q(concurrent_answers=0),
                name="key_limits_not_zero",
            ),
        ]

    def __str__(self) -> str:
        return f"apx_{self.mode}_…{self.last4}"
