"""What every resource under /v1 has in common: who may call, how often, how lists are cut into pages."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.http import HttpRequest
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from apex.api.callers import BearerKey, Caller, IsCustomer, PortalSession
from apex.api.problems import Problem
from apex.api.rate_limit import Decision, Limit, client_ip, take

PER_CALLER = Limit("default", requests=600, window_s=60)
PER_ADDRESS = Limit("public", requests=60, window_s=60)


class AlwaysJSON(BaseContentNegotiation):
    """There is one format, so what the client would accept decides nothing."""

    def select_parser(self, request: Request, parsers: Any) -> Any:
        given = request.content_type.partition(";")[0].strip()
        return next((parser for parser in parsers if parser.media_type == given), None)

    def select_renderer(self, request: Request, renderers: Any, format_suffix: str | None = None) -> Any:
        return renderers[0], renderers[0].media_type


class RateLimited(BaseThrottle):
    """Keeps the decision on the request, so that every answer tells how much is left."""

    def allow_request(self, request: Request, view: APIView) -> bool:
        if isinstance(request.auth, Caller):
            decision = take(PER_CALLER, request.auth.scope)
        else:
            decision = take(PER_ADDRESS, client_ip(request._request))
        request._request.rate_limit = decision  # type: ignore[attr-defined]
        if not decision.allowed:
            raise Problem(429, f"Too many requests. Try again in {decision.retry_after_s} seconds.")
        return True


class Resource(APIView):
    authentication_classes = [BearerKey, PortalSession]
    permission_classes = [IsCustomer]
    throttle_classes = [RateLimited]
    content_negotiation_class = AlwaysJSON

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        # The framework's parsers read a body of any size.
        if int(request.META.get("CONTENT_LENGTH") or 0) > settings.DATA_UPLOAD_MAX_MEMORY_SIZE:
            raise Problem(413, f"The body must not exceed {settings.DATA_UPLOAD_MAX_MEMORY_SIZE} bytes.")
        super().initial(request, *args, **kwargs)

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        response = super().finalize_response(request, response, *args, **kwargs)
        decision = getattr(_django_request(request), "rate_limit", None)
        if isinstance(decision, Decision):
            for name, value in decision.headers().items():
                response.headers[name] = value
        return response


def _django_request(request: Request | HttpRequest) -> HttpRequest:
    return request._request if isinstance(request, Request) else request


class Pages(CursorPagination):
    page_size = 50
    max_page_size = 200
    page_size_query_param = "limit"

    def get_page_size(self, request: Request) -> int:
        return page_size(request)


def page_size(request: Request) -> int:
    """`?limit=`, checked: a silently corrected limit would look like the end of the list."""
    given = request.query_params.get("limit")
    if given is None:
        return Pages.page_size
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= Pages.max_page_size):
        raise ValidationError({"limit": f"Give a whole number from 1 to {Pages.max_page_size}."})
    return int(given)


def position(request: Request) -> int | None:
    """`?cursor=` of lists whose cursor is the id of the last row seen. Raises NotFound like Pages does."""
    given = request.query_params.get("cursor")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 18):
        raise NotFound("Invalid cursor")
    return int(given)


def page_response(
    view: APIView, rows: QuerySet[Any], serializer: type[BaseSerializer[Any]], *, order: str
) -> Response:
    """One page of `rows`, newest first, as `{"next", "previous", "results"}`."""
    pages = Pages()
    pages.ordering = order
    items = pages.paginate_queryset(rows, view.request, view=view)
    return pages.get_paginated_response(serializer(items, many=True).data)
