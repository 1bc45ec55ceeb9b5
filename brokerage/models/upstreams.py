"""Third parties whose capacity is sold on."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from brokerage.models.fleet import Node


class Upstream(models.Model):
    """What a node is that is no machine of ours but a third party's OpenAI-compatible API.

    State, price and slots are the node's. The key is sealed (services/secrets.py) and never shown again.
    """

    class Resume(models.TextChoices):
        TEXT = "text", "by text: it continues an assistant's message (continue_final_message)"
        NONE = "none", "not at all: a cut answer ends with an error"

    node = models.OneToOneField(Node, on_delete=models.PROTECT, primary_key=True, related_name="upstream")
    base_url = models.CharField(
        "base URL",
        max_length=300,
        help_text="What stands before /chat/completions, such as https://api.example.com/openai/v1.",
    )
    model = models.CharField("model there", max_length=200, help_text="The model's name at that API.")
    sealed_key = models.TextField(blank=True, editable=False)
    key_ending = models.CharField(max_length=4, blank=True, editable=False)
    ca_pem = models.TextField(
        "certificate authority",
        blank=True,
        help_text="PEM of the only authority to trust. Empty: those that this system trusts.",
    )
    resume = models.CharField("a cut answer goes on", max_length=10, choices=Resume, default=Resume.NONE)

    class Meta:
        ordering = ["node__name"]
        constraints = [
            models.CheckConstraint(condition=Q(base_url__startswith="https://"), name="upstream_by_tls"),
            models.CheckConstraint(condition=Q(resume__in=["text", "none"]), name="upstream_has_no_ids"),
        ]

    def __str__(self) -> str:
        return self.node.name
