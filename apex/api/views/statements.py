"""Monthly statements: as JSON, and as files for book-keepers."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response

from apex.api.base import Resource
from apex.api.callers import customer_of
from apex.api.serializers import StatementMonthsSerializer, StatementSerializer
from apex.portal.statements import as_download, statement_months, statement_of
from ledger.statements import Statement

_MONTH = OpenApiParameter(
    "month",
    {"type": "string", "pattern": r"^\d{4}-\d{2}$", "examples": ["2026-11"]},
    OpenApiParameter.PATH,
    description="A calendar month; its days are those of UTC.",
)


def _found(request: Request, month: str) -> Statement:
    try:
        return statement_of(customer_of(request), month)
    except ValueError as error:
        raise NotFound(f"No statement: {error}.") from error


class Statements(Resource):
    @extend_schema(
        operation_id="list_statements", summary="Your monthly statements", responses=StatementMonthsSerializer
    )
    def get(self, request: Request) -> Response:
        """Every month since your wallet was opened, newest first. One that is not `final` may still grow."""
        months = statement_months(customer_of(request))
        return Response({"results": [{"month": str(month), "final": month.is_over} for month in months]})


class OneStatement(Resource):
    @extend_schema(
        operation_id="get_statement",
        summary="One month's movements",
        parameters=[_MONTH],
        responses=StatementSerializer,
    )
    def get(self, request: Request, month: str) -> Response:
        """The charges of a day are one line. `opening` and the lines add up to `closing`."""
        return Response(StatementSerializer(_found(request, month)).data)


class StatementFile(Resource):
    @extend_schema(
        operation_id="download_statement",
        summary="One month as a CSV or PDF file",
        parameters=[
            _MONTH,
            OpenApiParameter("extension", OpenApiTypes.STR, OpenApiParameter.PATH, enum=["csv", "pdf"]),
        ],
        responses={
            (200, "text/csv"): OpenApiTypes.STR,
            (200, "application/pdf"): OpenApiResponse(OpenApiTypes.BINARY),
        },
    )
    def get(self, request: Request, month: str, extension: str) -> HttpResponse | Any:
        return as_download(_found(request, month), extension)
