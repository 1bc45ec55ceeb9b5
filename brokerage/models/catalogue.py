"""What is sold: served models and their prices."""

from __future__ import annotations

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class ServedModel(models.Model):
    """A model by the name that clients send. All its nodes must have the same weights, tokenizer and template."""

    name = models.CharField(max_length=200, unique=True)
    description = models.CharField(max_length=500, blank=True)
    context_tokens = models.PositiveIntegerField()
    # What the first node reported, empty until then. A node with anything else cannot continue an answer of this
    # pool and is refused. Emptied by staff, the next node decides: so a pool goes to a new revision.
    tokenizer_id = models.CharField(max_length=64, blank=True, help_text="sha256 of tokenizer.json")
    revision = models.CharField(max_length=128, blank=True, help_text="commit or digest of the weights")
    template_id = models.CharField(
        max_length=64, blank=True, help_text="sha256 of what the chat template makes of a chat"
    )
    capabilities = models.JSONField(
        default=list, blank=True, help_text="what every node can be asked for, such as tools"
    )
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class ModelPrice(models.Model):
    """Price per token in a period. Rates have 12 places: 2.5e-9 USD a token is a real price."""

    served_model = models.ForeignKey(ServedModel, on_delete=models.PROTECT, related_name="prices")
    currency = models.CharField(max_length=3, default="USD")
    prompt_rate = models.DecimalField("price per prompt token", max_digits=24, decimal_places=12)
    completion_rate = models.DecimalField("price per completion token", max_digits=24, decimal_places=12)
    valid = DateTimeRangeField(help_text="From (inclusive) and until (exclusive, empty for open), UTC.")

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(prompt_rate__gte=0, completion_rate__gte=0), name="price_not_negative"
            ),
            ExclusionConstraint(
                name="one_price_at_a_time",
                expressions=[
                    ("served_model", RangeOperators.EQUAL),
                    ("currency", RangeOperators.EQUAL),
                    ("valid", RangeOperators.OVERLAPS),
                ],
            ),
        ]

    def __str__(self) -> str:
        return f"{self.served_model}: {self.prompt_rate}/{self.completion_rate} {self.currency} a token"
