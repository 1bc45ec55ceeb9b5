"""Answers that were delivered."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from apex.api.base import Resource, page_response
from apex.api.callers import customer_of
from apex.api.schema import PAGING, page_of
from apex.api.serializers import UsageSerializer
from apex.portal.selectors import usage_of


def _moment(request: Request, name: str) -> datetime | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        return serializers.DateTimeField().run_validation(text)
    except serializers.ValidationError as error:
        raise serializers.ValidationError({name: error.detail}) from error


def _id(request: Request, name: str) -> UUID | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        return serializers.UUIDField().run_validation(text)
    except serializers.ValidationError as error:
        raise serializers.ValidationError({name: error.detail}) from error


class Usage(Resource):
    @extend_schema(
        operation_id="list_usage",
        summary="Answers and what they cost",
        parameters=[
            *PAGING,
            OpenApiParameter("from", OpenApiTypes.DATETIME, description="Finished at or after this moment."),
            OpenApiParameter("to", OpenApiTypes.DATETIME, description="Finished before this moment."),
            OpenApiParameter(
                "journal", OpenApiTypes.UUID, description="Charged by this journal of the entries."
            ),
            OpenApiParameter("project", OpenApiTypes.UUID, description="Asked for by a key of this project."),
        ],
        responses=page_of(UsageSerializer),
    )
    def get(self, request: Request) -> Response:
        """One row for each answer, newest first, however many machines worked on it."""
        rows = usage_of(customer_of(request), charge=_id(request, "journal"))
        if project := _id(request, "project"):
            rows = rows.filter(api_key__project=project)
        if since := _moment(request, "from"):
            rows = rows.filter(finished_at__gte=since)
        if until := _moment(request, "to"):
            rows = rows.filter(finished_at__lt=until)
        return page_response(self, rows, UsageSerializer, order="-finished_at")
