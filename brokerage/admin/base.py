"""Pages that show rows and change them only by named actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.auth.models import User
from django.db.models import Model
from django.http import HttpRequest

if TYPE_CHECKING:
    AnyModelAdmin = admin.ModelAdmin[Any]
    AnyTabularInline = admin.TabularInline[Any, Any]
else:
    AnyModelAdmin, AnyTabularInline = admin.ModelAdmin, admin.TabularInline


class ReadOnlyAdmin(AnyModelAdmin):
    """No form changes or deletes a row. Actions ask for `permissions=["operate"]`."""

    show_full_result_count = False
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Django's change permission, which the form itself is never granted."""
        return request.user.has_perm(f"{self.opts.app_label}.change_{self.opts.model_name}")


class AddOnlyAdmin(ReadOnlyAdmin):
    """Rows are made with a form and never changed by one."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.add_{self.opts.model_name}")


class ReadOnlyInline(AnyTabularInline):
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


def staff(request: HttpRequest) -> User:
    """The signed-in clerk; the admin site lets nobody else this far."""
    assert isinstance(request.user, User)
    return request.user
