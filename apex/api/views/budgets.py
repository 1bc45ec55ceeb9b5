"""What keys, projects and customers may spend, and where each budget stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from django.core.exceptions import ValidationError as ModelValidationError
from django.db import transaction
from django.shortcuts import get_object_or_404
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import ValidationError

from apex.api.base import Pages, Resource
from apex.api.budgets import BudgetSerializer, ChangedBudgetSerializer, NewBudgetSerializer
from apex.api.callers import Caller, customer_of
from apex.api.idempotency import run_once
from apex.api.problems import Problem
from apex.api.schema import IDEMPOTENCY_KEY_OPTIONAL, PAGING, page_of
from brokerage.models import APIKey, Budget, Customer, Project
from brokerage.services.budgets import budget_status, remove_budget, set_budget


class Budgets(Resource):
    @extend_schema(
        operation_id="list_budgets",
        summary="Your budgets",
        parameters=PAGING,
        responses=page_of(BudgetSerializer),
    )
    def get(self, request: Request) -> Response:
        customer = customer_of(request)
        pages = Pages()
        pages.ordering = "-id"
        budgets = pages.paginate_queryset(Budget.objects.filter(customer=customer), request, view=self)
        standing = {"standing": budget_status(customer)}
        shown = BudgetSerializer(budgets, many=True, context=standing)
        return pages.get_paginated_response(shown.data)

    @extend_schema(
        operation_id="create_budget",
        summary="Set a budget",
        parameters=[IDEMPOTENCY_KEY_OPTIONAL],
        request=NewBudgetSerializer,
        responses={201: BudgetSerializer},
    )
    def post(self, request: Request) -> Response:
        """One for each key or project and period, and one for all keys together. What was spent in the running
        window counts."""

        def create(_: str) -> Response:
            wanted = NewBudgetSerializer(data=request.data)
            wanted.is_valid(raise_exception=True)
            customer, period = customer_of(request), Budget.Period(wanted.validated_data["period"])
            about = _Scope.of(customer, wanted.validated_data)
            if Budget.objects.filter(customer=customer, period=period, **asdict(about)).exists():
                raise Problem(409, "There is such a budget already: change that one.", code="budget-exists")
            budget = _set(request, customer, about, period, wanted.validated_data["amount"])
            return Response(_shown(budget), status=status.HTTP_201_CREATED)

        return run_once(request, create, required=False, in_transaction=True)


class OneBudget(Resource):
    @extend_schema(operation_id="get_budget", summary="One budget", responses=BudgetSerializer)
    def get(self, request: Request, budget_id: int) -> Response:
        return Response(_shown(self._budget(request, budget_id)))

    @extend_schema(
        operation_id="change_budget",
        summary="Change the amount of a budget",
        request=ChangedBudgetSerializer,
        responses=BudgetSerializer,
    )
    @transaction.atomic
    def patch(self, request: Request, budget_id: int) -> Response:
        budget = self._budget(request, budget_id)
        wanted = ChangedBudgetSerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        period = Budget.Period(budget.period)
        about = _Scope(budget.api_key, budget.project)
        changed = _set(request, budget.customer, about, period, wanted.validated_data["amount"])
        return Response(_shown(changed))

    @extend_schema(operation_id="delete_budget", summary="Remove a budget", responses={204: None})
    def delete(self, request: Request, budget_id: int) -> Response:
        """From now on nothing of it is checked."""
        remove_budget(budget=self._budget(request, budget_id), actor=_actor(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _budget(self, request: Request, budget_id: int) -> Budget:
        mine = Budget.objects.select_related("customer", "api_key", "project").filter(
            customer=customer_of(request)
        )
        return get_object_or_404(mine, pk=budget_id)


@dataclass(frozen=True, slots=True)
class _Scope:
    """What a budget is for. Both None: all keys together."""

    api_key: APIKey | None
    project: Project | None

    @classmethod
    def of(cls, customer: Customer, wanted: dict[str, Any]) -> Self:
        key = project = None
        if (key_id := wanted["api_key"]) is not None:
            key = APIKey.objects.filter(pk=key_id, customer=customer).first()
            if key is None:
                raise ValidationError({"api_key": "You have no key with this id."})
        if (project_id := wanted["project"]) is not None:
            project = Project.objects.filter(pk=project_id, customer=customer).first()
            if project is None:
                raise ValidationError({"project": "You have no project with this id."})
        return cls(key, project)


def _set(
    request: Request, customer: Customer, about: _Scope, period: Budget.Period, amount: dict[str, Any]
) -> Budget:
    if amount["currency"] != customer.currency:
        raise Problem(422, f"Your credits are in {customer.currency}.", code="wrong-currency")
    try:
        return set_budget(
            customer=customer,
            api_key=about.api_key,
            project=about.project,
            period=period,
            amount=amount["amount"],
            actor=_actor(request),
        )
    except ModelValidationError as error:
        raise ValidationError(error.message_dict) from error


def _actor(request: Request) -> Any:
    return request.auth.user if isinstance(request.auth, Caller) else None


def _shown(budget: Budget) -> Any:
    return BudgetSerializer(budget, context={"standing": budget_status(budget.customer)}).data
