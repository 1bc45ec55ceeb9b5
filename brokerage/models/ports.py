"""Steered ports: TCP ports on the gateways that belong to one customer and lead to nodes of one pool."""

from __future__ import annotations

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from brokerage.models.catalogue import ServedModel
from brokerage.models.customers import Customer
from brokerage.models.fleet import Node


class SteeredPort(models.Model):
    """One node serves, one stands by. Gateways follow within a second of a change."""

    class Mode(models.TextChoices):
        HTTP = "http", "HTTP/1.1, moves between requests"
        TCP = "tcp", "any TCP, moves when idle"

    class State(models.TextChoices):
        OPEN = "open"
        CLOSED = "closed"

    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="steered_ports")
    name = models.CharField(
        max_length=100, help_text="For people; the customer's only open port of that name."
    )
    number = models.PositiveIntegerField(
        "port",
        validators=[MinValueValidator(1), MaxValueValidator(65535)],
        help_text="Where every gateway listens. Within APEX_STEERED_PORTS.",
    )
    mode = models.CharField(max_length=10, choices=Mode, default=Mode.HTTP)
    served_model = models.ForeignKey(
        ServedModel,
        on_delete=models.PROTECT,
        related_name="steered_ports",
        verbose_name="pool",
        help_text="Its nodes take over from each other.",
    )
    primary = models.ForeignKey(
        Node,
        on_delete=models.PROTECT,
        related_name="+",
        null=True,
        blank=True,
        help_text="The node that serves.",
    )
    standby = models.ForeignKey(
        Node,
        on_delete=models.PROTECT,
        related_name="+",
        null=True,
        blank=True,
        help_text="The one that takes over; connected for each client beforehand.",
    )
    idle_ms = models.PositiveIntegerField(
        "idle time (ms)",
        default=200,
        validators=[MinValueValidator(1), MaxValueValidator(600_000)],
        help_text="In mode tcp: a connection moves when no byte came for so long.",
    )
    connections_max = models.PositiveIntegerField(
        "connections at most",
        default=1024,
        validators=[MinValueValidator(1), MaxValueValidator(10_000)],
        help_text="On each gateway; more are closed at once.",
    )
    state = models.CharField(max_length=10, choices=State, default=State.OPEN, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        db_table = "steered_port"
        ordering = ["number", "-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["number"],
                condition=Q(state="open"),
                name="steered_port_number_once",
                violation_error_message="Another open port has this number.",
            ),
            models.UniqueConstraint(
                fields=["customer", "name"],
                condition=Q(state="open"),
                name="steered_port_name_once",
                violation_error_message="The customer has an open port of this name.",
            ),
            models.CheckConstraint(
                condition=Q(number__range=(1, 65535)),
                name="steered_port_number_valid",
                violation_error_message="A port is a number from 1 to 65535.",
            ),
            models.CheckConstraint(
                condition=Q(idle_ms__range=(1, 600_000), connections_max__range=(1, 10_000)),
                name="steered_port_limits_valid",
                violation_error_message="The idle time is 1 ms to 10 minutes, connections are 1 to 10,000.",
            ),
            models.CheckConstraint(condition=Q(mode__in=["http", "tcp"]), name="steered_port_mode_known"),
            models.CheckConstraint(
                condition=Q(state__in=["open", "closed"]), name="steered_port_state_known"
            ),
            # Without a primary there is no standby: it would be the primary.
            models.CheckConstraint(
                condition=Q(standby__isnull=True) | (Q(primary__isnull=False) & ~Q(standby=F("primary"))),
                name="steered_port_two_nodes",
                violation_error_message="The standby has to be another node than the primary.",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} (:{self.number})"
