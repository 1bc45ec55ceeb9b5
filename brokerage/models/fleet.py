"""The machines: nodes, the provider's notices about them, and how traffic was flipped away."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from brokerage.models.catalogue import ServedModel


class Node(models.Model):
    """An inference server. Staff create it; its node worker reports address, epoch and health."""

    class State(models.TextChoices):
        EXPECTED = "expected"  # never heard of, or refused: `state_reason` says why
        READY = "ready"
        DRAINING = "draining"  # gets no new requests
        GONE = "gone"  # silent, or its inference server does not answer

    name = models.CharField(max_length=100, unique=True)
    provider = models.CharField(max_length=50, default="mesh")
    zone = models.CharField(max_length=50, blank=True)
    served_model = models.ForeignKey(ServedModel, on_delete=models.PROTECT, related_name="nodes")
    state = models.CharField(max_length=20, choices=State, default=State.EXPECTED)
    state_reason = models.CharField(max_length=300, blank=True, help_text="Why it is not ready.")
    # Start time of the node worker in ms since 1970: grows with every start.
    epoch = models.BigIntegerField(default=0)
    # The last incarnation that was told to drain. With `epoch` it decides between ready and draining,
    # so no order of heartbeats, notices and restarts can bring a drained incarnation back.
    drained_epoch = models.BigIntegerField(default=0)
    host = models.CharField(max_length=255, blank=True)
    port = models.PositiveIntegerField(default=0)
    engine = models.CharField(max_length=60, blank=True, help_text="Inference server and its version.")
    tokenizer_id = models.CharField(max_length=64, blank=True)
    revision = models.CharField(max_length=128, blank=True)
    template_id = models.CharField(max_length=64, blank=True)
    capabilities = models.JSONField(default=list, blank=True)
    slots = models.PositiveIntegerField(default=1, help_text="Answers it works on at the same time.")
    hourly_rate = models.DecimalField(
        max_digits=24,
        decimal_places=9,
        default=0,
        help_text="What the provider takes for an hour, in USD. The cheapest node with a free slot is used first.",
    )
    last_seen_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class EvictionNotice(models.Model):
    """What a provider said about a node. Kept once per (node, action, minute): providers repeat
    themselves, and some give a slightly different time at every poll."""

    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="notices")
    epoch = models.BigIntegerField()
    source = models.CharField(max_length=30)
    action = models.CharField(max_length=30)
    deadline = models.DateTimeField(null=True, blank=True)
    fingerprint = models.CharField(max_length=64, unique=True)
    signal_at = models.DateTimeField()
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.action} of {self.node}"


class Reroute(models.Model):
    """One flip: one row per (node, epoch), whoever reports first."""

    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="reroutes")
    epoch = models.BigIntegerField()
    signal_at = models.DateTimeField()
    flipped_at = models.DateTimeField(null=True, blank=True)
    first_byte_at = models.DateTimeField(null=True, blank=True)
    flows = models.PositiveIntegerField(default=0, help_text="Answers on the node when it was flipped.")
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        db_table = "reroute"
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(fields=["node", "epoch"], name="reroute_once"),
            models.CheckConstraint(
                condition=Q(first_byte_at__isnull=True) | Q(flipped_at__isnull=False),
                name="reroute_flip_first",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.node} at {self.signal_at:%Y-%m-%d %H:%M:%S}"
