"""What the nightly proof of the books found."""

from __future__ import annotations

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models


class Verification(models.Model):
    """One run over everything. `checks` is a list of {"name", "ok", "rows"}, as ledger_verify prints them."""

    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()
    ok = models.BooleanField()
    checks = models.JSONField(encoder=DjangoJSONEncoder)

    class Meta:
        db_table = "ledger_verification"
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"books {'proved' if self.ok else 'WRONG'} at {self.finished_at:%Y-%m-%d %H:%M}"
