"""Budgets: set, changed and removed by staff, with what is left of each."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest

from brokerage.admin.base import AddOnlyAdmin, staff
from brokerage.models import Budget
from brokerage.services import budgets


class BudgetForm(forms.ModelForm):  # type: ignore[type-arg]
    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        key = cleaned.get("api_key")
        if key is not None and "customer" in cleaned and key.customer_id != cleaned["customer"].pk:
            raise forms.ValidationError({"api_key": "This key belongs to another customer."})
        project = cleaned.get("project")
        if project is not None and "customer" in cleaned and project.customer_id != cleaned["customer"].pk:
            raise forms.ValidationError({"project": "This project belongs to another customer."})
        return cleaned


@admin.register(Budget)
class BudgetAdmin(AddOnlyAdmin):
    """Whose it is and its period are settled when it is made; the amount can be changed."""

    form = BudgetForm
    list_display = ["customer", "project", "api_key", "period", "amount"]
    list_filter = ["period"]
    list_select_related = ["customer", "project", "api_key"]
    search_fields = ["customer__name", "project__name", "api_key__name", "api_key__last4"]
    autocomplete_fields = ["customer", "project", "api_key"]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_operate_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("brokerage.delete_budget")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        asked = ["customer", "project", "api_key", "period", "amount"]
        return asked if obj is None else [*asked, "standing"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [] if obj is None else ["customer", "project", "api_key", "period", "standing"]

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        return {}  # the bulk delete would pass by the service

    @admin.display(description="in this window")
    def standing(self, budget: Budget) -> str:
        now = budgets.budget_status(budget.customer)[budget.pk]
        return (
            f"{now.spent.normalize():f} spent, {now.held.normalize():f} held for answers under way,"
            f" {now.left.normalize():f} left; begins anew at {now.window_end:%Y-%m-%d %H:%M} UTC"
        )

    def save_model(self, request: HttpRequest, obj: Budget, form: Any, change: bool) -> None:
        stored = budgets.set_budget(
            customer=obj.customer,
            api_key=obj.api_key,
            project=obj.project,
            period=Budget.Period(obj.period),
            amount=obj.amount,
            actor=staff(request),
        )
        obj.pk = stored.pk

    def delete_model(self, request: HttpRequest, obj: Budget) -> None:
        budgets.remove_budget(budget=obj, actor=staff(request))
