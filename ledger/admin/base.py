"""What every page of the books has in common: for reading only, and as fast on the millionth row as on the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth.models import User
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from ledger.money import format_money

if TYPE_CHECKING:
    AnyModelAdmin = admin.ModelAdmin[Any]
    AnyTabularInline = admin.TabularInline[Any, Any]
else:
    AnyModelAdmin, AnyTabularInline = admin.ModelAdmin, admin.TabularInline

POSITION = "before"


class ReadOnly:
    """Nobody adds, changes or deletes by a form, whatever their permissions."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class KeysetChangeList(ChangeList):
    """Newest first, page by position (`?before=ID`): nothing is counted and no row is skipped over.

    Django's own list counts the rows of every page it shows, and reads all those before it.
    """

    older: str | None
    newest: str
    is_first: bool

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        # Neither a filter, nor part of the links to filters: those begin at the newest row again.
        self.filter_params.pop(POSITION, None)
        return super().get_queryset(request, exclude_parameters)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        return ["-pk"]

    def get_results(self, request: HttpRequest) -> None:
        position = request.GET.get(POSITION, "")
        rows = self.queryset
        self.is_first = not (position.isascii() and position.isdigit() and len(position) <= 18)
        if not self.is_first:
            rows = rows.filter(pk__lt=int(position))
        found = list(rows[: self.list_per_page + 1])
        shown = found[: self.list_per_page]
        self.older = self.get_query_string({POSITION: str(shown[-1].pk)}) if len(found) > len(shown) else None
        self.newest = self.get_query_string()
        self.result_list = shown
        self.result_count = len(shown)
        self.full_result_count = None
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = False
        self.multi_page = False
        self.paginator = Paginator(shown, self.list_per_page)


class BooksAdmin(ReadOnly, AnyModelAdmin):
    """A list of rows that only ever grows. Sorted by age: other orders would have to sort all of it."""

    change_list_template = "admin/ledger/books_change_list.html"
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    sortable_by = ()
    actions: Any = None
    empty_text = "Nothing yet."

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return KeysetChangeList

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        return super().changelist_view(request, {"empty_text": self.empty_text, **(extra_context or {})})

    class Media:
        css: ClassVar = {"all": ["admin-books.css"]}

    @admin.display(description="amount")
    def exact_amount(self, row: Any) -> str:
        return format_money(row.amount)


class ReadOnlyInline(ReadOnly, AnyTabularInline):
    extra = 0
    can_delete = False


def actor_of(request: HttpRequest) -> str:
    """How the books name the signed-in clerk; the admin site lets nobody else this far."""
    assert isinstance(request.user, User)
    return f"user:{request.user.get_username()}"


def may(request: HttpRequest, action: str, model: type[Model]) -> bool:
    """Whether the clerk has Django's permission `action` (add, change, ...) on the model."""
    assert isinstance(request.user, User)
    return request.user.has_perm(f"{model._meta.app_label}.{action}_{model._meta.model_name}")
