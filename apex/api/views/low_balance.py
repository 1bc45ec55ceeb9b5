"""What happens when credits run low: the rule of a customer, read and set."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError as ModelValidationError
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from apex.api.base import Resource
from apex.api.budgets import BudgetMoneySerializer
from apex.api.callers import Caller, customer_of
from apex.api.problems import Problem
from apex.api.serializers import MoneySerializer
from apex.portal.purchases import TOP_UP_MAX, TOP_UP_MIN
from brokerage.models import Customer, LowBalanceRule
from brokerage.services.topping_up import is_owner, set_low_balance_rule, settled_this_month
from ledger.money import api_money

FIELDS = ("notice_below", "top_up_below", "top_up_amount", "monthly_cap")


class LowBalanceRuleSerializer(serializers.Serializer):
    """Null is off. The last three go together: a purchase is prepared for approval, and never paid by itself."""

    notice_below = BudgetMoneySerializer(allow_null=True)
    top_up_below = BudgetMoneySerializer(allow_null=True)
    top_up_amount = BudgetMoneySerializer(allow_null=True)
    monthly_cap = BudgetMoneySerializer(allow_null=True)

    def validate_top_up_amount(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if given is not None and not TOP_UP_MIN <= given["amount"] <= TOP_UP_MAX:
            raise serializers.ValidationError(f"A purchase is between {TOP_UP_MIN} and {TOP_UP_MAX}.")
        return given


class ShownLowBalanceRuleSerializer(LowBalanceRuleSerializer):
    """`paid_this_month` is what was paid of prepared purchases since the first, on the customer's clock."""

    paid_this_month = MoneySerializer()


class LowBalance(Resource):
    @extend_schema(
        operation_id="get_low_balance_rule",
        summary="What happens when credits run low",
        responses=ShownLowBalanceRuleSerializer,
    )
    def get(self, request: Request) -> Response:
        return Response(_shown(customer_of(request)))

    @extend_schema(
        operation_id="set_low_balance_rule",
        summary="Say what happens when credits run low",
        request=LowBalanceRuleSerializer,
        responses=ShownLowBalanceRuleSerializer,
    )
    def put(self, request: Request) -> Response:
        """The whole rule: what is null is off. By a key, or by an owner who is signed in."""
        customer, caller = customer_of(request), request.auth
        user = caller.user if isinstance(caller, Caller) else None
        if user is not None and not is_owner(customer=customer, user=user):
            raise Problem(403, "Only an owner of the team may change this.")
        wanted = LowBalanceRuleSerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        amounts = {name: _amount(wanted.validated_data[name], customer) for name in FIELDS}
        try:
            set_low_balance_rule(customer=customer, actor=user, **amounts)
        except ModelValidationError as error:
            raise serializers.ValidationError(error.message_dict) from error
        return Response(_shown(customer))


def _amount(given: dict[str, Any] | None, customer: Customer) -> Decimal | None:
    if given is None:
        return None
    if given["currency"] != customer.currency:
        raise Problem(422, f"Your credits are in {customer.currency}.", code="wrong-currency")
    amount: Decimal = given["amount"]
    return amount


def _shown(customer: Customer) -> dict[str, Any]:
    rule = LowBalanceRule.objects.filter(customer=customer).first()
    amounts = {name: getattr(rule, name, None) for name in FIELDS}
    shown: dict[str, Any] = {
        name: None if amount is None else api_money(amount, customer.currency)
        for name, amount in amounts.items()
    }
    return shown | {"paid_this_month": api_money(settled_this_month(customer), customer.currency)}
