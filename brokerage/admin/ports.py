"""Steered ports: opened, pointed at other nodes and closed by staff."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest

from brokerage.admin.base import AddOnlyAdmin, staff
from brokerage.models import Node, SteeredPort
from brokerage.services import ports


class _NodeField(forms.ModelChoiceField):  # type: ignore[type-arg]
    def label_from_instance(self, obj: Any) -> str:
        return f"{obj.name} ({obj.served_model}, {obj.state})"


class SteeredPortForm(forms.ModelForm):  # type: ignore[type-arg]
    def _get_validation_exclusions(self) -> set[str]:
        """What is taken is only taken while it is open, so the constraints have to see the state."""
        return super()._get_validation_exclusions() - {"state"}  # type: ignore[misc]

    def _post_clean(self) -> None:
        """The service's rules too, each beside its field. The instance is complete by now."""
        super()._post_clean()  # type: ignore[misc]
        if self.errors:
            return
        try:
            ports.check_port(self.instance)
        except ValidationError as error:
            self.add_error(None, error)


@admin.register(SteeredPort)
class SteeredPortAdmin(AddOnlyAdmin):
    """Customer, port and mode are settled when it is opened; its nodes can be changed under open connections."""

    form = SteeredPortForm
    change_list_template = "admin/brokerage/explained_change_list.html"
    list_display = ["number", "name", "customer", "mode", "served_model", "primary", "standby", "state"]
    list_filter = ["state", "mode", "served_model"]
    list_select_related = ["customer", "served_model", "primary", "standby"]
    search_fields = ["name", "customer__name", "number"]
    autocomplete_fields = ["customer"]
    actions = ["close"]
    empty_text = (
        "No steered port yet. Open one here: every gateway listens on it within a second, and leads each client "
        "to the primary, or to the standby once that has to take over."
    )

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        asked = ["customer", "name", "number", "mode", "served_model", "primary", "standby"]
        return [*asked, "idle_ms", "connections_max"] + ([] if obj is None else ["state", "created_at"])

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        if obj is None:
            return []
        kept = [name for name in self.get_fields(request, obj) if name not in ("primary", "standby")]
        return kept if obj.state == SteeredPort.State.OPEN else [*kept, "primary", "standby"]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_operate_permission(request)

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if db_field.name in ("primary", "standby"):
            nodes = Node.objects.select_related("served_model").order_by("served_model__name", "name")
            kwargs |= {"form_class": _NodeField, "queryset": nodes, "empty_label": "the pool's best"}
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        return super().changelist_view(request, {"empty_text": self.empty_text, **(extra_context or {})})

    def save_model(self, request: HttpRequest, obj: SteeredPort, form: Any, change: bool) -> None:
        if change:
            ports.retarget_port(port=obj, primary=obj.primary, standby=obj.standby, actor=staff(request))
            return
        made = ports.open_port(
            customer=obj.customer,
            name=obj.name,
            number=obj.number,
            mode=SteeredPort.Mode(obj.mode),
            served_model=obj.served_model,
            primary=obj.primary,
            standby=obj.standby,
            idle_ms=obj.idle_ms,
            connections_max=obj.connections_max,
            actor=staff(request),
        )
        obj.pk = made.pk

    @admin.action(description="Close: cut the connections and stop listening", permissions=["operate"])
    def close(self, request: HttpRequest, queryset: Any) -> None:
        done = sum(ports.close_port(port=port, actor=staff(request)) for port in queryset)
        self.message_user(request, f"{done} closed.", messages.SUCCESS)
