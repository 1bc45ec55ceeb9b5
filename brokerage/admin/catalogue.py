"""Served models and their prices."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from brokerage.admin.base import AddOnlyAdmin, AnyModelAdmin, ReadOnlyInline, staff
from brokerage.models import ModelPrice, ServedModel
from brokerage.services import catalogue


class ModelPriceInline(ReadOnlyInline):
    model = ModelPrice
    fields = ["currency", "prompt_rate", "completion_rate", "valid"]
    verbose_name_plural = "prices per token"


@admin.register(ServedModel)
class ServedModelAdmin(AnyModelAdmin):
    list_display = ["name", "context_tokens", "enabled", "revision", "tokenizer_id"]
    list_filter = ["enabled"]
    search_fields = ["name"]
    inlines = [ModelPriceInline]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return [] if obj is None else ["name", "created_at"]

    def get_exclude(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return ["revision", "tokenizer_id", "template_id", "capabilities", "enabled"] if obj is None else []

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # usage refers to it; `enabled` takes it off the list

    def save_model(self, request: HttpRequest, obj: ServedModel, form: Any, change: bool) -> None:
        if change:
            catalogue.change_model(served_model=obj, fields=form.changed_data, actor=staff(request))
            return
        made = catalogue.publish_model(
            name=obj.name,
            context_tokens=obj.context_tokens,
            description=obj.description,
            actor=staff(request),
        )
        obj.pk = made.pk


@admin.register(ModelPrice)
class ModelPriceAdmin(AddOnlyAdmin):
    """A new price is in force at once and ends the one before."""

    list_display = ["served_model", "currency", "prompt_rate", "completion_rate", "valid"]
    list_select_related = ["served_model"]
    list_filter = ["served_model", "currency"]
    ordering = ["-id"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        asked = ["served_model", "currency", "prompt_rate", "completion_rate"]
        return asked if obj is None else [*asked, "valid"]

    def save_model(self, request: HttpRequest, obj: ModelPrice, form: Any, change: bool) -> None:
        price = catalogue.set_price(
            served_model=obj.served_model,
            currency=obj.currency,
            prompt_rate=obj.prompt_rate,
            completion_rate=obj.completion_rate,
            actor=staff(request),
        )
        obj.pk = price.pk
