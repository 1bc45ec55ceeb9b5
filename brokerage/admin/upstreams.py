"""Third parties' APIs as nodes: added, changed, tried. The key goes in and never comes out."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db.models import QuerySet
from django.http import HttpRequest

from brokerage.admin.base import AnyModelAdmin, staff
from brokerage.models import Node, ServedModel, Upstream
from brokerage.services import nodes, upstreams
from brokerage.services.secrets import SecretUnreadable
from brokerage.services.upstreams import UpstreamSettings

UNTESTED = "_untested"  # the button that saves without a trial


class UpstreamForm(forms.ModelForm):  # type: ignore[type-arg]
    name = forms.CharField(max_length=100, help_text="As a node; customers see it in x-apex-node.")
    served_model = forms.ModelChoiceField(
        ServedModel.objects.all(), help_text="What it is sold as. All nodes of a model must be of one kind."
    )
    provider = forms.CharField(max_length=50, help_text="Whose API it is, for costs by provider.")
    api_key = forms.CharField(
        label="API key",
        required=False,
        strip=True,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )
    remove_key = forms.BooleanField(label="No key", required=False)
    slots = forms.IntegerField(
        initial=64, validators=[MinValueValidator(1)], help_text="Answers that it is asked for at a time."
    )
    hourly_rate = forms.DecimalField(
        initial=0,
        min_value=0,
        max_digits=24,
        decimal_places=9,
        help_text="USD. Only compared with that of other nodes: the cheapest with a free slot is used first.",
    )

    class Meta:
        model = Upstream
        fields = ("base_url", "model", "ca_pem", "resume")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stored: Upstream = self.instance
        self.is_new = not stored.pk
        for name in ("base_url", "model"):
            self.fields[name].widget.attrs["size"] = 60
        if self.is_bound:
            self.fields["api_key"].help_text = "It is not shown again: enter it once more."
        if self.is_new:
            del self.fields["remove_key"]
            return
        for name in ("name", "served_model", "provider"):
            del self.fields[name]
        rate = stored.node.hourly_rate.normalize()
        self.initial.update(slots=stored.node.slots, hourly_rate=f"{rate:f}")
        shown = f"The one that is stored ends with {stored.key_ending}." if stored.key_ending else ""
        there = shown or ("One is stored." if stored.sealed_key else "None is stored.")
        self.fields["api_key"].help_text = f"{there} Left empty, that stays so."

    def wanted(self) -> UpstreamSettings:
        data = self.cleaned_data
        typed: str | None = data["api_key"] or None
        return UpstreamSettings(
            base_url=data["base_url"],
            model=data["model"],
            api_key="" if data.get("remove_key") else typed,
            ca_pem=data["ca_pem"],
            resume=data["resume"],
            slots=data["slots"],
            hourly_rate=data["hourly_rate"],
        )

    def clean_name(self) -> str:
        name: str = self.cleaned_data["name"]
        if Node.objects.filter(name=name).exists():
            raise ValidationError(f"There is a node of the name {name!r} already.")
        return name

    def clean(self) -> Any:
        """The service's rules, each beside its field."""
        cleaned = super().clean()
        if not self.errors:
            try:
                upstreams.check_settings(self.wanted())
            except ValidationError as error:
                self.add_error(None, error)
        return cleaned

    def _post_clean(self) -> None:
        """And the API's own word."""
        super()._post_clean()  # type: ignore[misc]
        if self.errors or UNTESTED in self.data:
            return
        stored = None if self.is_new else Upstream.objects.get(pk=self.instance.pk)
        try:
            upstreams.try_upstream(wanted=self.wanted(), stored=stored)
        except SecretUnreadable as error:
            self.add_error("api_key", str(error))
        except ValidationError as error:
            self.add_error(None, error)


@admin.register(Upstream)
class UpstreamAdmin(AnyModelAdmin):
    form = UpstreamForm
    change_list_template = "admin/brokerage/explained_change_list.html"
    change_form_template = "admin/brokerage/upstream/change_form.html"
    list_display = ["node", "served_model", "base_url", "model", "state", "state_reason", "key"]
    list_select_related = ["node__served_model"]
    list_filter = ["node__state", "node__served_model"]
    search_fields = ["node__name", "base_url"]
    actions = ["test_connection", "drain"]
    empty_text = (
        "No third party yet. Add one here: its address, the model's name there and a key. It is asked for a word "
        "before it is stored, and gateways use it within a second."
    )

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        node = ["name", "served_model", "provider"] if obj is None else []
        key = ["api_key"] if obj is None else ["api_key", "remove_key"]
        return [
            (None, {"fields": [*node, "base_url", "model", *key, "resume"]}),
            ("Use", {"fields": ["slots", "hourly_rate"]}),
            ("Trust", {"fields": ["ca_pem"]}),
        ]

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        return self.form  # its fields are not only the model's

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # usage refers to it; "drain" takes it out of use

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        return super().changelist_view(request, {"empty_text": self.empty_text, **(extra_context or {})})

    @admin.display(ordering="node__served_model__name")
    def served_model(self, upstream: Upstream) -> str:
        return str(upstream.node.served_model)

    @admin.display(ordering="node__state")
    def state(self, upstream: Upstream) -> str:
        return upstream.node.state

    @admin.display(description="reason")
    def state_reason(self, upstream: Upstream) -> str:
        return upstream.node.state_reason

    @admin.display
    def key(self, upstream: Upstream) -> str:
        if not upstream.sealed_key:
            return "none"
        return f"…{upstream.key_ending}" if upstream.key_ending else "stored"

    def save_form(self, request: HttpRequest, form: Any, change: bool) -> Any:
        return form.instance

    def save_model(self, request: HttpRequest, obj: Upstream, form: Any, change: bool) -> None:
        if change:
            stored = Upstream.objects.select_related("node__served_model").get(pk=obj.pk)
            upstreams.change_upstream(upstream=stored, wanted=form.wanted(), actor=staff(request))
            return
        data = form.cleaned_data
        made = upstreams.add_upstream(
            name=data["name"],
            served_model=data["served_model"],
            provider=data["provider"],
            wanted=form.wanted(),
            actor=staff(request),
        )
        obj.node = made.node

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """There is nothing else."""

    @admin.action(description="Test the connection", permissions=["change"])
    def test_connection(self, request: HttpRequest, queryset: QuerySet[Upstream]) -> None:
        for upstream in queryset.select_related("node"):
            try:
                upstreams.try_upstream(wanted=_stored_settings(upstream), stored=upstream)
            except (ValidationError, SecretUnreadable) as error:
                said = "; ".join(error.messages) if isinstance(error, ValidationError) else str(error)
                self.message_user(request, f"{upstream}: {said}", messages.ERROR)
            else:
                self.message_user(request, f"{upstream} answers.", messages.SUCCESS)

    @admin.action(description="Drain: no new requests until it is saved again", permissions=["change"])
    def drain(self, request: HttpRequest, queryset: QuerySet[Upstream]) -> None:
        who = staff(request)
        reason = f"drained by {who.get_username()}"
        done = sum(
            nodes.mark_draining(node=each.node, epoch=each.node.epoch, reason=reason, actor=who)
            for each in queryset.select_related("node")
        )
        self.message_user(request, f"{done} told to drain.", messages.SUCCESS)


def _stored_settings(upstream: Upstream) -> UpstreamSettings:
    return UpstreamSettings(
        base_url=upstream.base_url, model=upstream.model, ca_pem=upstream.ca_pem, resume=upstream.resume
    )
