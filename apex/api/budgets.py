"""The JSON of budgets and of the limits of keys."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from apex.api.serializers import CurrencyField, MoneySerializer
from brokerage.models import APIKey, Budget
from brokerage.services.budgets import BudgetStatus
from brokerage.services.limits import FIELDS
from ledger.money import api_money

_AMOUNT = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?")


@extend_schema_field({"type": "string", "pattern": f"^{_AMOUNT.pattern}$", "examples": ["50.00"]})
class BudgetAmountField(serializers.CharField):
    """Text with at most nine places. A JSON number would have passed through a float."""

    def to_internal_value(self, data: Any) -> Decimal:  # type: ignore[override]
        if not isinstance(data, str) or not _AMOUNT.fullmatch(data):
            raise serializers.ValidationError("Give the amount as text, such as “50.00”.", code="malformed")
        return Decimal(data)


class BudgetMoneySerializer(serializers.Serializer):
    amount = BudgetAmountField()
    currency = CurrencyField()

    def validate_currency(self, given: str) -> str:
        if not re.fullmatch("[A-Z]{3}", given):
            raise serializers.ValidationError("Give three capital letters, such as USD.")
        return given


class ChangedBudgetSerializer(serializers.Serializer):
    amount = BudgetMoneySerializer()


class NewBudgetSerializer(ChangedBudgetSerializer):
    """For one key, for one project, or, with neither, for all keys together."""

    api_key = serializers.UUIDField(allow_null=True, default=None)
    project = serializers.UUIDField(allow_null=True, default=None)
    period = serializers.ChoiceField(choices=Budget.Period.choices)


class BudgetSerializer(serializers.ModelSerializer):
    """`spent` is final, `held` is the most that answers under way can add, `left` is what remains."""

    api_key = serializers.UUIDField(source="api_key_id", allow_null=True)
    project = serializers.UUIDField(source="project_id", allow_null=True)
    amount = serializers.SerializerMethodField()
    spent = serializers.SerializerMethodField()
    held = serializers.SerializerMethodField()
    left = serializers.SerializerMethodField()
    window_start = serializers.SerializerMethodField()
    window_end = serializers.SerializerMethodField()

    class Meta:
        model = Budget
        fields = [
            "id", "api_key", "project", "period", "amount", "spent", "held", "left", "window_start", "window_end",
        ]  # fmt: skip

    def _standing(self, budget: Budget) -> BudgetStatus:
        found: BudgetStatus = self.context["standing"][budget.pk]
        return found

    def _money(self, budget: Budget, name: str) -> dict[str, str]:
        return api_money(getattr(self._standing(budget), name), budget.customer.currency)

    @extend_schema_field(MoneySerializer)
    def get_amount(self, budget: Budget) -> dict[str, str]:
        return self._money(budget, "amount")

    @extend_schema_field(MoneySerializer)
    def get_spent(self, budget: Budget) -> dict[str, str]:
        return self._money(budget, "spent")

    @extend_schema_field(MoneySerializer)
    def get_held(self, budget: Budget) -> dict[str, str]:
        return self._money(budget, "held")

    @extend_schema_field(MoneySerializer)
    def get_left(self, budget: Budget) -> dict[str, str]:
        return self._money(budget, "left")

    @extend_schema_field(OpenApiTypes.DATETIME)
    def get_window_start(self, budget: Budget) -> str:
        return _moment(self._standing(budget).window_start)

    @extend_schema_field(OpenApiTypes.DATETIME)
    def get_window_end(self, budget: Budget) -> str:
        return _moment(self._standing(budget).window_end)


def _moment(moment: datetime) -> str:
    """As every other time of the API; in text, because a stored answer is JSON."""
    return str(serializers.DateTimeField().to_representation(moment))


class KeyLimitsSerializer(serializers.ModelSerializer):
    """What is left out stays; null is no limit."""

    class Meta:
        model = APIKey
        fields = FIELDS
