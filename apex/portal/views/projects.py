"""Projects of a customer: what each spends, its keys and budgets; made, renamed and archived."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods

from apex.portal.forms import ProjectForm
from apex.portal.scope import for_customer
from apex.portal.selectors import projects_of, usage_by_day, usage_of
from apex.portal.views.budgets import budget_rows
from apex.portal.views.home import plot_of
from brokerage.models import Budget, Customer, Project
from brokerage.services.projects import archive_project, create_project, rename_project


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def projects(request: HttpRequest, customer: Customer) -> HttpResponse:
    form = ProjectForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            made = create_project(
                customer=customer,
                name=form.cleaned_data["name"],
                actor=request.user,  # type: ignore[arg-type]
            )
        except ValidationError as error:
            form.add_error("name", error.messages)
        else:
            messages.success(request, f"“{made}” is there. Make a key in it, or set a budget.")
            return redirect("portal:project", made.pk)
    rows = projects_of(customer).order_by("-archived_at", "-is_default", "name")
    status = 422 if request.method == "POST" else 200
    return render(request, "portal/projects.html", {"form": form, "projects": rows}, status=status)


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def project(request: HttpRequest, customer: Customer, project_id: UUID) -> HttpResponse:
    found = get_object_or_404(projects_of(customer), pk=project_id)
    form = ProjectForm(request.POST if request.method == "POST" else None, initial={"name": found.name})
    if request.method == "POST" and form.is_valid():
        try:
            rename_project(
                project=found,
                name=form.cleaned_data["name"],
                actor=request.user,  # type: ignore[arg-type]
            )
        except ValidationError as error:
            form.add_error("name", error.messages)
            found.refresh_from_db(fields=["name"])
        else:
            messages.success(request, "The project has its new name.")
            return redirect("portal:project", found.pk)
    days = usage_by_day(customer, project=found)
    budgets = Budget.objects.filter(project=found).select_related("project", "api_key").order_by("id")
    context = {
        "project": found,
        "form": form,
        "days": days,
        "used": any(day.answers for day in days),
        "plot": plot_of(days, customer.currency),
        "keys": found.api_keys.order_by("revoked_at", "-created_at"),
        "budgets": budget_rows(customer, budgets),
        "recent": usage_of(customer, project=found)[:5],
    }
    status = 422 if request.method == "POST" else 200
    return render(request, "portal/project.html", context, status=status)


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def archive(request: HttpRequest, customer: Customer, project_id: UUID) -> HttpResponse:
    found: Project = get_object_or_404(projects_of(customer), pk=project_id, is_default=False)
    if request.method != "POST":
        return render(request, "portal/archive_project.html", {"project": found})
    revoked = archive_project(project=found, actor=request.user)  # type: ignore[arg-type]
    keys = "1 key is" if revoked == 1 else f"{revoked} keys are"
    messages.success(request, f"“{found}” is archived, and {keys} revoked.")
    return redirect("portal:projects")
