"""What may be spent: budgets of all keys together, of projects and of single keys, and how far each is used up."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from apex.portal.forms import BudgetForm, KeyLimitsForm
from apex.portal.scope import for_customer
from brokerage.models import APIKey, Budget, Customer
from brokerage.services.budgets import BudgetStatus, budget_status, remove_budget, set_budget
from brokerage.services.limits import set_key_limits


@dataclass(frozen=True, slots=True)
class BudgetRow:
    budget: Budget
    standing: BudgetStatus

    @property
    def used_percent(self) -> int:
        """What is spent or held; 100 for a budget of nothing."""
        if not self.standing.amount:
            return 100
        used = (self.standing.spent + self.standing.held) / self.standing.amount
        return min(100, int(used * 100))


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def budgets(request: HttpRequest, customer: Customer) -> HttpResponse:
    if request.method != "POST":
        return _page(
            request, customer, BudgetForm(customer, initial={"scope": request.GET.get("scope", "all")})
        )
    form = BudgetForm(customer, request.POST)
    if not form.is_valid():
        return _page(request, customer, form, status=422)
    try:
        set_budget(
            customer=customer,
            api_key=form.key,
            project=form.project,
            period=Budget.Period(form.cleaned_data["period"]),
            amount=form.cleaned_data["amount"],
            actor=request.user,  # type: ignore[arg-type]
        )
    except ValidationError as error:
        form.add_error("amount", error.messages)
        return _page(request, customer, form, status=422)
    messages.success(request, "The budget is set.")
    return redirect("portal:budgets")


def _page(request: HttpRequest, customer: Customer, form: BudgetForm, *, status: int = 200) -> HttpResponse:
    mine = Budget.objects.select_related("project", "api_key").order_by(
        "project__name", "api_key__name", "id"
    )
    rows = budget_rows(customer, mine.filter(customer=customer))
    return render(request, "portal/budgets.html", {"form": form, "rows": rows}, status=status)


def budget_rows(customer: Customer, budgets: QuerySet[Budget]) -> list[BudgetRow]:
    """These budgets of the customer, with where they stand."""
    standing = budget_status(customer)
    return [BudgetRow(budget, standing[budget.pk]) for budget in budgets if budget.pk in standing]


@require_POST
@for_customer
def remove(request: HttpRequest, customer: Customer, budget_id: int) -> HttpResponse:
    budget = get_object_or_404(Budget, pk=budget_id, customer=customer)
    remove_budget(budget=budget, actor=request.user)  # type: ignore[arg-type]
    messages.success(request, "The budget is removed.")
    return redirect("portal:budgets")


@require_http_methods(["GET", "HEAD", "POST"])
@for_customer
def key_limits(request: HttpRequest, customer: Customer, key_id: UUID) -> HttpResponse:
    key = get_object_or_404(APIKey, pk=key_id, customer=customer)
    form = KeyLimitsForm(request.POST if request.method == "POST" else None, instance=key)
    if request.method == "POST" and form.is_valid():
        set_key_limits(key=key, actor=request.user, **form.cleaned_data)  # type: ignore[arg-type]
        messages.success(request, f"The limits of “{key.name}” are set. They hold from the next second on.")
        return redirect("portal:keys")
    status = 422 if request.method == "POST" else 200
    return render(request, "portal/key_limits.html", {"form": form, "key": key}, status=status)
