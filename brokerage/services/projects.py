"""Projects of a customer: made, renamed, archived."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from brokerage.models import APIKey, Customer, Project
from brokerage.services.audit import record
from brokerage.services.keys import revoke_key


def default_project(customer: Customer) -> Project:
    """The one that the database made with the customer."""
    return Project.objects.get(customer=customer, is_default=True)


@transaction.atomic
def create_project(*, customer: Customer, name: str, actor: User | None) -> Project:
    """Raises ValidationError, keyed by field, for an empty, too long or taken name."""
    project = Project(customer=customer)
    _name(project, name)
    record("project.created", actor=actor, subject=project, customer=str(customer.pk), name=project.name)
    return project


@transaction.atomic
def rename_project(*, project: Project, name: str, actor: User | None) -> bool:
    """True when this call changed it. Raises ValidationError as `create_project`, and for an archived one."""
    before = project.name
    if name.strip() == before:
        return False
    if project.archived_at is not None:
        raise ValidationError({"name": "An archived project keeps its name."})
    _name(project, name)
    record("project.renamed", actor=actor, subject=project, before=before, name=project.name)
    return True


@transaction.atomic
def archive_project(*, project: Project, actor: User | None) -> int:
    """Revokes its keys, which gateways follow within a second, and takes no new ones. Cannot be undone.

    Its usage and budgets stay to be read. Returns how many keys were revoked; again revokes nothing. Raises
    ValidationError for the default project.
    """
    if project.is_default:
        raise ValidationError("The default project stays: it has the keys that name no other.")
    archived = Project.objects.filter(pk=project.pk, archived_at__isnull=True).update(archived_at=Now())
    if not archived:
        return 0
    keys = APIKey.objects.filter(project=project, revoked_at__isnull=True)
    revoked = sum(revoke_key(key=key, actor=actor) for key in keys)
    record("project.archived", actor=actor, subject=project, keys_revoked=revoked)
    return revoked


def _name(project: Project, name: str) -> None:
    project.name = name.strip()
    if not project.name:
        raise ValidationError({"name": "Give the project a name."})
    project.clean_fields(exclude={"created_at"})
    try:
        with transaction.atomic():
            if project._state.adding:
                project.save(force_insert=True)
            else:
                project.save(update_fields=["name"])
    except IntegrityError as error:
        if "project_name_once" not in str(error):
            raise
        raise ValidationError({"name": "You have a project of this name already."}) from error
