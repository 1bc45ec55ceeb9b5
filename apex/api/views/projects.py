"""Projects: what a customer keeps apart."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError as ModelValidationError
from django.shortcuts import get_object_or_404
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import ValidationError

from apex.api.base import Resource, page_response
from apex.api.callers import Caller, customer_of
from apex.api.idempotency import run_once
from apex.api.problems import Problem
from apex.api.schema import IDEMPOTENCY_KEY_OPTIONAL, PAGING, page_of
from apex.api.serializers import NamedProjectSerializer, ProjectSerializer
from apex.portal.selectors import projects_of
from brokerage.models import Project
from brokerage.services.projects import archive_project, create_project, rename_project


class Projects(Resource):
    @extend_schema(
        operation_id="list_projects",
        summary="Your projects",
        parameters=PAGING,
        responses=page_of(ProjectSerializer),
    )
    def get(self, request: Request) -> Response:
        """Archived ones too; `archived_at` tells them."""
        return page_response(self, projects_of(customer_of(request)), ProjectSerializer, order="-created_at")

    @extend_schema(
        operation_id="create_project",
        summary="Make a project",
        parameters=[IDEMPOTENCY_KEY_OPTIONAL],
        request=NamedProjectSerializer,
        responses={201: ProjectSerializer},
    )
    def post(self, request: Request) -> Response:
        def create(_: str) -> Response:
            customer = customer_of(request)
            try:
                project = create_project(customer=customer, name=_name(request), actor=_actor(request))
            except ModelValidationError as error:
                raise ValidationError(error.message_dict) from error
            shown = ProjectSerializer(projects_of(customer).get(pk=project.pk))
            return Response(shown.data, status=status.HTTP_201_CREATED)

        return run_once(request, create, required=False, in_transaction=True)


class OneProject(Resource):
    @extend_schema(operation_id="get_project", summary="One project", responses=ProjectSerializer)
    def get(self, request: Request, project_id: UUID) -> Response:
        return Response(ProjectSerializer(self._project(request, project_id)).data)

    @extend_schema(
        operation_id="rename_project",
        summary="Rename a project",
        request=NamedProjectSerializer,
        responses=ProjectSerializer,
    )
    def patch(self, request: Request, project_id: UUID) -> Response:
        project = self._project(request, project_id)
        try:
            rename_project(project=project, name=_name(request), actor=_actor(request))
        except ModelValidationError as error:
            raise ValidationError(error.message_dict) from error
        return Response(ProjectSerializer(project).data)

    @extend_schema(operation_id="archive_project", summary="Archive a project", responses={204: None})
    def delete(self, request: Request, project_id: UUID) -> Response:
        """Revokes its keys, from the next second on, and cannot be undone. Its usage can still be read."""
        try:
            archive_project(project=self._project(request, project_id), actor=_actor(request))
        except ModelValidationError as error:
            raise Problem(409, error.messages[0], code="default-project") from error
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _project(self, request: Request, project_id: UUID) -> Project:
        return get_object_or_404(projects_of(customer_of(request)), pk=project_id)


def _name(request: Request) -> str:
    wanted = NamedProjectSerializer(data=request.data)
    wanted.is_valid(raise_exception=True)
    name: str = wanted.validated_data["name"]
    return name


def _actor(request: Request) -> Any:
    return request.auth.user if isinstance(request.auth, Caller) else None
