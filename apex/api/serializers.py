"""The JSON of the API. Money is an amount in text and a currency, never a float."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from djmoney.money import Money
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from apex.portal.purchases import TOP_UP_MAX, TOP_UP_MIN
from brokerage.models import APIKey, ModelPrice, PilotApplication, Project, Reroute, ServedModel, UsageEvent
from ledger.models import CreditGrant, Hold, TopUp
from ledger.money import api_money
from ledger.selectors import EntryRow, OpenGrant, Wallet
from ledger.statements import Statement, StatementLine

_TOP_UP_AMOUNT = re.compile(r"[0-9]{1,4}(\.[0-9]{1,2})?")


@extend_schema_field({"type": "string", "pattern": r"^-?\d{1,15}\.\d{9}$", "examples": ["12.340000000"]})
class AmountField(serializers.CharField):
    pass


@extend_schema_field({"type": "string", "pattern": "^[A-Z]{3}$", "examples": ["USD"]})
class CurrencyField(serializers.CharField):
    pass


class MoneySerializer(serializers.Serializer):
    amount = AmountField()
    currency = CurrencyField()

    class Meta:
        ref_name = "Money"


def money_of(money: Money) -> dict[str, str]:
    return api_money(money.amount, money.currency.code)


def _money_or_none(amount: Decimal | None, currency: str) -> dict[str, str] | None:
    return None if amount is None else api_money(amount, currency)


class PricesSerializer(serializers.Serializer):
    """Per million tokens, which is exact: rates have 12 places, amounts 9."""

    prompt = MoneySerializer()
    completion = MoneySerializer()


class ModelSerializer(serializers.ModelSerializer):
    id = serializers.CharField(source="name")
    ready_nodes = serializers.IntegerField()
    price_per_million_tokens = serializers.SerializerMethodField()

    class Meta:
        model = ServedModel
        fields = ["id", "description", "context_tokens", "ready_nodes", "price_per_million_tokens"]

    @extend_schema_field(PricesSerializer(allow_null=True))
    def get_price_per_million_tokens(self, served: ServedModel) -> dict[str, dict[str, str]] | None:
        price: ModelPrice | None = next(iter(served.prices.all()), None)
        if price is None:
            return None
        return {
            "prompt": api_money(price.prompt_rate * 1_000_000, price.currency),
            "completion": api_money(price.completion_rate * 1_000_000, price.currency),
        }


class UsageSerializer(serializers.ModelSerializer):
    """An answer. `amount` is null until it is charged, which takes seconds."""

    id = serializers.UUIDField(source="request_id")
    model = serializers.CharField(source="served_model.name")
    amount = serializers.SerializerMethodField()

    class Meta:
        model = UsageEvent
        fields = [
            "id", "model", "api_key", "outcome", "prompt_tokens", "completion_tokens",
            "started_at", "finished_at", "amount", "charged_at",
        ]  # fmt: skip

    @extend_schema_field(MoneySerializer(allow_null=True))
    def get_amount(self, usage: UsageEvent) -> dict[str, str] | None:
        return _money_or_none(usage.amount, usage.currency)


class APIKeySerializer(serializers.ModelSerializer):
    project = serializers.UUIDField(source="project_id")

    class Meta:
        model = APIKey
        fields = [
            "id", "project", "name", "mode", "last4", "created_at", "last_used_at", "expires_at", "revoked_at",
            "requests_per_minute", "tokens_per_minute", "concurrent_answers",
        ]  # fmt: skip


class NewAPIKeySerializer(serializers.Serializer):
    """Without a project, or with null, the key goes into the default one. It stays in its project."""

    name = serializers.CharField(max_length=100)
    project = serializers.UUIDField(allow_null=True, default=None)
    mode = serializers.ChoiceField(choices=APIKey.Mode.choices, default=APIKey.Mode.LIVE)


class ProjectSerializer(serializers.ModelSerializer):
    """`spent` is what was charged in the last 30 days, today included."""

    active_keys = serializers.IntegerField()
    spent = serializers.SerializerMethodField()

    class Meta:
        model = Project
        fields = ["id", "name", "is_default", "active_keys", "spent", "created_at", "archived_at"]

    @extend_schema_field(MoneySerializer)
    def get_spent(self, project: Any) -> dict[str, str]:
        return api_money(project.spent, project.customer.currency)


class NamedProjectSerializer(serializers.Serializer):
    name = serializers.CharField(max_length=100)


class IssuedAPIKeySerializer(APIKeySerializer):
    """`key` is the whole key. It is in the first answer only: a replayed one has null."""

    key = serializers.CharField(allow_null=True)

    class Meta(APIKeySerializer.Meta):
        fields = [*APIKeySerializer.Meta.fields, "key"]


class EvictionSerializer(serializers.ModelSerializer):
    """A machine that was taken back, and how traffic was flipped away from it."""

    node = serializers.CharField(source="node.name")
    reroute_ms = serializers.SerializerMethodField()

    class Meta:
        model = Reroute
        fields = ["id", "node", "signal_at", "flipped_at", "first_byte_at", "reroute_ms", "flows"]

    def get_reroute_ms(self, reroute: Reroute) -> float | None:
        if reroute.first_byte_at is None:
            return None
        return round((reroute.first_byte_at - reroute.signal_at).total_seconds() * 1000, 3)


class PilotApplicationSerializer(serializers.ModelSerializer):
    class Meta:
        model = PilotApplication
        fields = ["name", "email", "company", "use_case"]


class ReceivedSerializer(serializers.Serializer):
    """The same for every well-formed application, so that nobody learns who has applied."""

    status = serializers.ChoiceField(choices=["received"])


class GrantSerializer(serializers.Serializer):
    """Credit with terms of its own; without `expires_at` it has no end."""

    id = serializers.IntegerField()
    kind = serializers.ChoiceField(choices=CreditGrant.Kind.values)
    amount = serializers.SerializerMethodField()
    remaining = serializers.SerializerMethodField()
    expires_at = serializers.DateTimeField(allow_null=True)

    @extend_schema_field(MoneySerializer)
    def get_amount(self, grant: OpenGrant) -> dict[str, str]:
        return api_money(grant.amount, grant.currency)

    @extend_schema_field(MoneySerializer)
    def get_remaining(self, grant: OpenGrant) -> dict[str, str]:
        return api_money(grant.remaining, grant.currency)


class BalanceSerializer(serializers.Serializer):
    posted = MoneySerializer()
    held = MoneySerializer()
    available = MoneySerializer()
    granted = MoneySerializer()
    pending = MoneySerializer()
    grants = GrantSerializer(many=True)


def balance_json(wallet: Wallet, grants: Sequence[OpenGrant]) -> dict[str, Any]:
    names = ("posted", "held", "available", "granted", "pending")
    balance: dict[str, Any] = {name: api_money(getattr(wallet, name), wallet.currency) for name in names}
    return balance | {"grants": GrantSerializer(grants, many=True).data}


class EntrySerializer(serializers.Serializer):
    """One movement. `balance` is what was posted right after it, `lines` how many answers a charge is for."""

    id = serializers.IntegerField()
    journal = serializers.UUIDField(source="journal_public_id")
    kind = serializers.CharField()
    amount = serializers.SerializerMethodField()
    balance = serializers.SerializerMethodField()
    lines = serializers.IntegerField()
    effective_at = serializers.DateTimeField()
    created_at = serializers.DateTimeField()

    @extend_schema_field(MoneySerializer)
    def get_amount(self, entry: EntryRow) -> dict[str, str]:
        return api_money(entry.amount, entry.currency)

    @extend_schema_field(MoneySerializer)
    def get_balance(self, entry: EntryRow) -> dict[str, str]:
        return api_money(entry.balance, entry.currency)


class StatementMonthSerializer(serializers.Serializer):
    month = serializers.CharField()
    final = serializers.BooleanField()


class StatementMonthsSerializer(serializers.Serializer):
    results = StatementMonthSerializer(many=True)


class StatementLineSerializer(serializers.Serializer):
    """A journal, or a day's charges. `reference` is the journal's id, null for charges."""

    day = serializers.DateField()
    kind = serializers.CharField()
    reference = serializers.SerializerMethodField()
    lines = serializers.IntegerField()
    amount = serializers.SerializerMethodField()
    balance = serializers.SerializerMethodField()

    @extend_schema_field({"type": "string", "format": "uuid", "nullable": True})
    def get_reference(self, line: StatementLine) -> str | None:
        return line.reference or None

    @extend_schema_field(MoneySerializer)
    def get_amount(self, line: StatementLine) -> dict[str, str]:
        return api_money(line.amount, self.context["currency"])

    @extend_schema_field(MoneySerializer)
    def get_balance(self, line: StatementLine) -> dict[str, str]:
        return api_money(line.balance, self.context["currency"])


class StatementSerializer(serializers.Serializer):
    month = serializers.CharField()
    final = serializers.BooleanField(source="month.is_over")
    opening = serializers.SerializerMethodField()
    closing = serializers.SerializerMethodField()
    lines = serializers.SerializerMethodField()

    @extend_schema_field(MoneySerializer)
    def get_opening(self, found: Statement) -> dict[str, str]:
        return api_money(found.opening, found.currency)

    @extend_schema_field(MoneySerializer)
    def get_closing(self, found: Statement) -> dict[str, str]:
        return api_money(found.closing, found.currency)

    @extend_schema_field(StatementLineSerializer(many=True))
    def get_lines(self, found: Statement) -> Any:
        return StatementLineSerializer(found.lines, many=True, context={"currency": found.currency}).data


class HoldSerializer(serializers.ModelSerializer):
    amount = serializers.SerializerMethodField()
    captured = serializers.SerializerMethodField()

    class Meta:
        model = Hold
        fields = ["id", "state", "amount", "captured", "created_at", "expires_at", "closed_at"]

    @extend_schema_field(MoneySerializer)
    def get_amount(self, hold: Hold) -> dict[str, str]:
        return money_of(hold.amount)

    @extend_schema_field(MoneySerializer)
    def get_captured(self, hold: Hold) -> dict[str, str]:
        return api_money(hold.captured, hold.amount.currency.code)


class TopUpSerializer(serializers.ModelSerializer):
    """`approve_url` is where the payer agrees; empty once that is no longer possible."""

    id = serializers.UUIDField(source="public_id")
    amount = serializers.SerializerMethodField()
    approve_url = serializers.CharField()

    class Meta:
        model = TopUp
        fields = ["id", "state", "amount", "approve_url", "failure", "created_at", "changed_at"]

    @extend_schema_field(MoneySerializer)
    def get_amount(self, top_up: TopUp) -> dict[str, str]:
        return money_of(top_up.amount)


@extend_schema_field({"type": "string", "pattern": f"^{_TOP_UP_AMOUNT.pattern}$", "examples": ["25.00"]})
class TopUpAmountField(serializers.DecimalField):
    """Text with at most two places, as PayPal takes it. A JSON number would have passed through a float."""

    def to_internal_value(self, data: Any) -> Decimal:
        if not isinstance(data, str) or not _TOP_UP_AMOUNT.fullmatch(data):
            raise serializers.ValidationError("Give the amount as text, such as “25.00”.", code="malformed")
        return super().to_internal_value(data)


class NewTopUpAmountSerializer(serializers.Serializer):
    amount = TopUpAmountField(max_digits=6, decimal_places=2, min_value=TOP_UP_MIN, max_value=TOP_UP_MAX)
    currency = serializers.ChoiceField(choices=["USD"])


class NewTopUpSerializer(serializers.Serializer):
    amount = NewTopUpAmountSerializer()

    def validate_amount(self, given: dict[str, Any]) -> Money:
        return Money(given["amount"], given["currency"])


class CheckSerializer(serializers.Serializer):
    status = serializers.ChoiceField(choices=["pass", "warn", "fail"])
    latency_ms = serializers.FloatField()
    detail = serializers.CharField()


class HealthSerializer(serializers.Serializer):
    status = serializers.ChoiceField(choices=["pass", "warn", "fail"])
    version = serializers.CharField()
    checked_at = serializers.DateTimeField()
    checks = serializers.DictField(child=CheckSerializer())
