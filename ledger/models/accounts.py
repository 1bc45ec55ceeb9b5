"""Accounts, and the balance rows of those that are locked when money moves."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from ledger.models.fields import decimal_field


class Account(models.Model):
    """A place for money of one currency. An amount > 0 credits it, an amount < 0 debits it.

    `hot` accounts are the platform's: they are only ever appended to, and their balance is the sum of
    their entries. All others have a Balance row, which is locked and checked by every posting.
    """

    class Type(models.TextChoices):
        ASSET = "asset"
        LIABILITY = "liability"
        REVENUE = "revenue"
        EXPENSE = "expense"

    code = models.CharField(max_length=120, unique=True)
    owner = models.CharField(max_length=120, blank=True, db_index=True)
    currency = models.CharField(max_length=3)
    type = models.CharField(max_length=10, choices=Type)
    hot = models.BooleanField()
    created_at = models.DateTimeField(db_default=Now())
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["code"]
        constraints = [
            # The target of the composite foreign keys that keep currencies apart.
            models.UniqueConstraint(fields=["id", "currency"], name="account_currency"),
            models.CheckConstraint(condition=Q(currency__regex="^[A-Z]{3}$"), name="account_currency_code"),
        ]

    def __str__(self) -> str:
        return self.code


class Balance(models.Model):
    """What a wallet has. The row lock on it is what makes two spends at once impossible."""

    account = models.OneToOneField(Account, on_delete=models.PROTECT, primary_key=True)
    posted = decimal_field(default=0)
    held = decimal_field(default=0)
    floor = decimal_field(default=0, null=True, help_text="Lowest posted - held; empty: no limit.")
    granted = decimal_field(default=0, help_text="Part of posted: what remains of its credit grants.")
    version = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(held__gte=0), name="balance_held_not_negative"),
            models.CheckConstraint(
                condition=Q(posted__gte=F("floor") + F("held")), name="balance_above_floor"
            ),
            models.CheckConstraint(
                condition=Q(granted__gte=0) & Q(posted__gte=F("floor") + F("granted")),
                name="balance_granted_within",
            ),
        ]

    def __str__(self) -> str:
        return f"balance of account {self.account_id}"


class AccountTotal(models.Model):
    """The sum of an account's entries up to one of them, so that the platform's accounts need not be summed up
    from the first. Only a shortcut: `posted` can be made again from the entries, and ledger_verify does so."""

    account = models.OneToOneField(Account, on_delete=models.PROTECT, primary_key=True, related_name="total")
    up_to_entry = models.BigIntegerField()
    posted = decimal_field()
    taken_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "ledger_account_total"

    def __str__(self) -> str:
        return f"total of account {self.account_id} up to entry {self.up_to_entry}"
