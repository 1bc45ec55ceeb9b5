"""Projects: what a customer keeps apart. Rules that need two tables are in sql/projects.sql."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Lower, Now

from brokerage.models.customers import Customer


class Project(models.Model):
    """Keys, usage and budgets of one purpose. Every customer has a default one, for keys that name none.

    A key belongs to its project for life, so usage belongs to the project that it was asked for in.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="projects")
    name = models.CharField(max_length=100)
    is_default = models.BooleanField(default=False, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    archived_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-is_default", "name"]
        constraints = [
            models.UniqueConstraint(
                "customer",
                Lower("name"),
                condition=Q(archived_at__isnull=True),
                name="project_name_once",
                violation_error_message="You have a project of this name already.",
            ),
            models.UniqueConstraint(
                fields=["customer"], condition=Q(is_default=True), name="project_default_once"
            ),
            models.CheckConstraint(
                condition=Q(is_default=False) | Q(archived_at__isnull=True), name="project_default_stays"
            ),
            # For the foreign keys that want key, budget and project to be of the same customer.
            models.UniqueConstraint(fields=["id", "customer"], name="project_of_customer"),
        ]

    def __str__(self) -> str:
        return self.name
