"""Credit leases have no row of their own (they are holds); what gateways say to each other about them has."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class LeaseCall(models.Model):
    """A gateway is about to refuse a request for want of credit: others give back what they have leased of the
    wallet and do not need, and nobody leases from it for a while (sql/leases.sql)."""

    account_id = models.BigIntegerField(primary_key=True)
    called_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"account {self.account_id} at {self.called_at:%H:%M:%S}"
