"""Applications, customers, their members and keys."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html

from brokerage.admin.base import AddOnlyAdmin, ReadOnlyAdmin, ReadOnlyInline, staff
from brokerage.models import APIKey, Budget, Customer, Member, PilotApplication, Project
from brokerage.services import budgets, customers, keys, limits, projects

_KEY_FACTS = ["last4", "created_at", "created_by", "last_used_at", "expires_at", "revoked_at"]
_SHOWN_ONCE = "{} Pass it on now, it is not shown again: <code>{}</code>"


@admin.register(PilotApplication)
class PilotApplicationAdmin(ReadOnlyAdmin):
    list_display = ["company", "email", "state", "created_at", "decided_by"]
    list_filter = ["state"]
    list_select_related = ["decided_by"]
    search_fields = ["company", "email"]
    actions = ["approve", "decline"]

    @admin.action(description="Approve: make customer, wallet and API key", permissions=["operate"])
    def approve(self, request: HttpRequest, queryset: QuerySet[PilotApplication]) -> None:
        for application in queryset:
            try:
                approval = customers.approve_application(application=application, staff=staff(request))
            except customers.AlreadyDecided as error:
                self.message_user(request, str(error), messages.WARNING)
                continue
            text = f"{approval.customer} is a customer, an invitation is on its way to {approval.invitation.email}. API key."
            shown = format_html(_SHOWN_ONCE, text, approval.api_key_plaintext)
            self.message_user(request, shown, messages.SUCCESS)

    @admin.action(description="Decline", permissions=["operate"])
    def decline(self, request: HttpRequest, queryset: QuerySet[PilotApplication]) -> None:
        for application in queryset:
            try:
                customers.decline_application(application=application, staff=staff(request))
            except customers.AlreadyDecided as error:
                self.message_user(request, str(error), messages.WARNING)
            else:
                self.message_user(request, f"{application.company} is declined.", messages.SUCCESS)


class MemberInline(ReadOnlyInline):
    model = Member
    fields = ["user", "role", "created_at"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("user", "customer")


class APIKeyInline(ReadOnlyInline):
    model = APIKey
    fields = ["name", "mode", "last4", "created_at", "last_used_at", "expires_at", "revoked_at"]
    readonly_fields = ["last4", "created_at", "last_used_at", "revoked_at"]


class ProjectInline(ReadOnlyInline):
    model = Project
    fields = ["name", "is_default", "created_at", "archived_at"]
    readonly_fields = ["is_default", "created_at", "archived_at"]
    show_change_link = True


class BudgetInline(ReadOnlyInline):
    model = Budget
    fields = ["project", "api_key", "period", "amount"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("project", "api_key", "customer")


class CustomerForm(forms.ModelForm):  # type: ignore[type-arg]
    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if "time_zone" in cleaned:
            budgets.check_zone(cleaned["time_zone"])
        return cleaned


@admin.register(Customer)
class CustomerAdmin(ReadOnlyAdmin):
    """Customers are made by approving an application. The form changes the time zone only."""

    list_display = ["name", "currency", "suspended_at", "created_at"]
    list_filter = [("suspended_at", admin.EmptyFieldListFilter)]
    search_fields = ["name", "members__user__email"]
    fields = ["name", "currency", "suspended_at", "created_at", "time_zone"]
    readonly_fields = ["name", "currency", "suspended_at", "created_at"]
    inlines = [MemberInline, ProjectInline, APIKeyInline, BudgetInline]
    actions = ["suspend", "reinstate"]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_operate_permission(request)

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        return super().get_form(request, obj, change=change, **{"form": CustomerForm, **kwargs})

    def save_model(self, request: HttpRequest, obj: Customer, form: Any, change: bool) -> None:
        budgets.set_time_zone(customer=obj, time_zone=obj.time_zone, actor=staff(request))

    @admin.action(description="Suspend: refuse all its keys", permissions=["operate"])
    def suspend(self, request: HttpRequest, queryset: QuerySet[Customer]) -> None:
        done = sum(
            customers.suspend_customer(customer=customer, actor=staff(request)) for customer in queryset
        )
        self.message_user(request, f"{done} suspended.", messages.SUCCESS)

    @admin.action(description="Reinstate", permissions=["operate"])
    def reinstate(self, request: HttpRequest, queryset: QuerySet[Customer]) -> None:
        done = sum(
            customers.reinstate_customer(customer=customer, actor=staff(request)) for customer in queryset
        )
        self.message_user(request, f"{done} reinstated.", messages.SUCCESS)


class MemberForm(forms.ModelForm):  # type: ignore[type-arg]
    email = forms.EmailField(max_length=150, help_text="Invited by mail when new to Apex.")

    class Meta:
        model = Member
        fields = ["customer", "role"]


@admin.register(Member)
class MemberAdmin(AddOnlyAdmin):
    list_display = ["user", "customer", "role", "created_at"]
    list_select_related = ["user", "customer"]
    search_fields = ["user__email", "customer__name"]
    autocomplete_fields = ["customer"]

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        if obj is None:
            kwargs["form"] = MemberForm
        return super().get_form(request, obj, change=change, **kwargs)

    def save_model(self, request: HttpRequest, obj: Member, form: Any, change: bool) -> None:
        member = customers.add_member(
            customer=obj.customer,
            email=form.cleaned_data["email"],
            role=Member.Role(obj.role),
            actor=staff(request),
        )
        obj.pk, obj.user = member.pk, member.user


@admin.register(Project)
class ProjectAdmin(ReadOnlyAdmin):
    """Customers make and rename them; staff look, and archive one in an emergency."""

    list_display = ["name", "customer", "is_default", "created_at", "archived_at"]
    list_filter = [("archived_at", admin.EmptyFieldListFilter)]
    list_select_related = ["customer"]
    search_fields = ["name", "customer__name"]
    fields = ["name", "customer", "is_default", "created_at", "archived_at"]
    readonly_fields = ["is_default", "created_at", "archived_at"]
    inlines = [APIKeyInline]
    actions = ["archive"]

    @admin.action(description="Archive: revoke all its keys", permissions=["operate"])
    def archive(self, request: HttpRequest, queryset: QuerySet[Project]) -> None:
        for project in queryset.select_related("customer"):
            try:
                revoked = projects.archive_project(project=project, actor=staff(request))
            except ValidationError as error:
                self.message_user(
                    request, f"{project} of {project.customer}: {error.messages[0]}", messages.ERROR
                )
                continue
            told = f"{project} of {project.customer} is archived; keys revoked: {revoked}."
            self.message_user(request, told, messages.SUCCESS)


@admin.register(APIKey)
class APIKeyAdmin(AddOnlyAdmin):
    """Of a key that is made only the limits can be changed."""

    list_display = ["__str__", "customer", "project", "name", "created_at", "last_used_at", "revoked_at"]
    list_filter = ["mode", ("revoked_at", admin.EmptyFieldListFilter)]
    list_select_related = ["customer", "project"]
    search_fields = ["name", "last4", "customer__name"]
    autocomplete_fields = ["customer"]
    actions = ["revoke"]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_operate_permission(request)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        asked = ["customer", "name", "mode"]
        return asked if obj is None else [*asked, "project", *_KEY_FACTS, *limits.FIELDS]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [] if obj is None else ["customer", "project", "name", "mode", *_KEY_FACTS]

    def save_model(self, request: HttpRequest, obj: APIKey, form: Any, change: bool) -> None:
        if change:
            wanted = {name: form.cleaned_data[name] for name in limits.FIELDS}
            limits.set_key_limits(key=obj, actor=staff(request), **wanted)
            return
        issued = keys.issue_key(
            customer=obj.customer, name=obj.name, mode=APIKey.Mode(obj.mode), actor=staff(request)
        )
        obj.pk, obj.last4 = issued.key.pk, issued.key.last4
        self.message_user(
            request, format_html(_SHOWN_ONCE, "The new API key.", issued.plaintext), messages.SUCCESS
        )

    @admin.action(description="Revoke", permissions=["operate"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[APIKey]) -> None:
        done = sum(keys.revoke_key(key=key, actor=staff(request)) for key in queryset)
        self.message_user(request, f"{done} revoked.", messages.SUCCESS)
