"""Money from outside: what was intended, what we were told, what was settled."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from ledger.models.accounts import Account
from ledger.models.fields import decimal_field, money_field
from ledger.models.journals import Journal


class TopUp(models.Model):
    """A customer's wish to buy credit. Written before PayPal is called; never credits by itself.

    The request ids are made once and kept, so that any call may be repeated after a crash.
    """

    class State(models.TextChoices):
        STARTED = "started"  # intent only: PayPal may or may not know of it
        APPROVING = "approving"  # the order exists, the payer has not agreed yet
        PENDING = "pending"  # captured, but PayPal keeps the money for now (review, eCheck)
        SETTLED = "settled"
        FAILED = "failed"  # refused by PayPal, cancelled or never approved: nothing was paid

    UNFINISHED = (State.STARTED, State.APPROVING, State.PENDING)

    public_id = models.UUIDField(unique=True, default=uuid.uuid4, editable=False)
    rail = models.CharField(max_length=10, db_default="orders")
    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="top_ups")
    amount = money_field()
    state = models.CharField(max_length=10, choices=State, default=State.STARTED)
    idempotency_key = models.CharField(max_length=200, unique=True)
    create_request_id = models.UUIDField(default=uuid.uuid4, editable=False)
    capture_request_id = models.UUIDField(default=uuid.uuid4, editable=False)
    return_url = models.CharField(max_length=500)
    cancel_url = models.CharField(max_length=500)
    order_id = models.CharField(max_length=64, null=True, unique=True)
    approve_url = models.CharField(max_length=500, blank=True)
    failure = models.CharField(max_length=200, blank=True)
    actor = models.CharField(max_length=120)
    created_at = models.DateTimeField(db_default=Now())
    changed_at = models.DateTimeField(db_default=Now())

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[TopUp]] = models.Manager()

    class Meta:
        db_table = "ledger_top_up"
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(amount__gt=0), name="top_up_amount_positive"),
            models.CheckConstraint(
                condition=~Q(state__in=["approving", "pending", "settled"]) | Q(order_id__isnull=False),
                name="top_up_order_known",
            ),
        ]
        indexes = [
            models.Index(
                fields=["changed_at"],
                condition=Q(state__in=["started", "approving", "pending"]),
                name="top_up_unfinished",
            )
        ]

    def __str__(self) -> str:
        return f"top-up {self.public_id}"


class InboundEvent(models.Model):
    """Something a provider sent us, as the very bytes. A trigger only: the truth is read from its API.

    It waits until `due_at`, is applied once, or is parked for a person to look at: `error` says why.
    `about` is what it speaks of: our purchase, or the provider's capture, refund or dispute.
    """

    channel = models.CharField(max_length=40)
    dedup_key = models.CharField(max_length=200, unique=True)
    about = models.CharField(max_length=127, blank=True, db_default="", db_index=True)
    raw = models.BinaryField()
    headers = models.JSONField(default=dict)
    verified = models.BooleanField(null=True)
    received_at = models.DateTimeField(db_default=Now())
    attempts = models.PositiveSmallIntegerField(db_default=0)
    due_at = models.DateTimeField(db_default=Now())
    applied_at = models.DateTimeField(null=True)
    parked_at = models.DateTimeField(null=True)
    error = models.TextField(blank=True)

    class Meta:
        db_table = "ledger_inbound_event"
        ordering = ["-id"]
        indexes = [
            models.Index(
                fields=["due_at"],
                condition=Q(applied_at__isnull=True, parked_at__isnull=True),
                name="inbound_event_waiting",
            ),
            models.Index(
                fields=["parked_at"], condition=Q(parked_at__isnull=False), name="inbound_event_parked"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.channel} {self.dedup_key}"


class Settlement(models.Model):
    """Money that a provider really moved, once per (provider, kind, external_id) whatever told us of it.

    Kinds: capture, refund, reversal, reversal_cancelled, refund_failed (of a wallet, which `account` is);
    withdrawal, provider_fee, dispute_held, dispute_freed, payout (of the platform's own account there).
    """

    provider = models.CharField(max_length=20)
    kind = models.CharField(max_length=20)
    external_id = models.CharField(max_length=64)
    parent_external_id = models.CharField(max_length=64, blank=True)
    order_id = models.CharField(max_length=64, blank=True)
    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="settlements")
    top_up = models.ForeignKey(TopUp, null=True, on_delete=models.PROTECT, related_name="settlements")
    gross = money_field(currency_field_name="currency")
    fee = decimal_field()
    net = decimal_field()
    journal = models.OneToOneField(Journal, on_delete=models.PROTECT, related_name="settlement")
    occurred_at = models.DateTimeField(null=True, help_text="When the provider says that it moved.")
    created_at = models.DateTimeField(db_default=Now())

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[Settlement]] = models.Manager()

    class Meta:
        db_table = "settlement"
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["provider", "kind", "external_id"], name="settlement_once"),
            # One movement may be told as a refund by one channel and as a reversal by another.
            models.UniqueConstraint(
                fields=["provider", "external_id"],
                condition=Q(kind__in=["refund", "reversal"]),
                name="settlement_taken_once",
            ),
            models.CheckConstraint(condition=Q(gross=F("fee") + F("net")), name="settlement_adds_up"),
        ]
        indexes = [
            models.Index(fields=["provider", "parent_external_id"], name="settlement_by_parent"),
            models.Index(fields=["provider", "occurred_at"], name="settlement_by_time"),
        ]

    def __str__(self) -> str:
        return f"{self.provider} {self.kind} {self.external_id}"


class ParkedRefund(models.Model):
    """A refund that was told before its capture, or money given back before it was taken. Booked with that.

    One that does not fit the capture stays parked with its error, as the capture has to be booked anyway.
    """

    provider = models.CharField(max_length=20)
    kind = models.CharField(max_length=20, db_default="refund")
    external_id = models.CharField(max_length=64)
    capture_id = models.CharField(max_length=64)
    gross = money_field(currency_field_name="currency")
    fee = decimal_field(help_text="The part of the provider's fee that it gives back.")
    actor = models.CharField(max_length=120)
    effective_at = models.DateTimeField(null=True)
    parked_at = models.DateTimeField(db_default=Now())
    applied_at = models.DateTimeField(null=True)
    error = models.TextField(blank=True, help_text="Why the capture left it parked.")

    # Written out for the type checker: django-money puts a manager of its own in its place.
    objects: ClassVar[models.Manager[ParkedRefund]] = models.Manager()

    class Meta:
        db_table = "ledger_parked_refund"
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["provider", "kind", "external_id"], name="refund_parked_once"),
        ]
        indexes = [
            models.Index(
                fields=["provider", "capture_id"],
                condition=Q(applied_at__isnull=True),
                name="refund_waiting",
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.external_id} of {self.capture_id}"
