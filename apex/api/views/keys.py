"""API keys, managed by API key or from the portal."""

from __future__ import annotations

from uuid import UUID

from django.core.exceptions import ValidationError as ModelValidationError
from django.db import transaction
from django.shortcuts import get_object_or_404
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import ValidationError

from apex.api.base import Resource, page_response
from apex.api.budgets import KeyLimitsSerializer
from apex.api.callers import Caller, customer_of
from apex.api.idempotency import run_once
from apex.api.schema import IDEMPOTENCY_KEY_OPTIONAL, PAGING, page_of
from apex.api.serializers import APIKeySerializer, IssuedAPIKeySerializer, NewAPIKeySerializer
from brokerage.models import APIKey, Project
from brokerage.services.keys import issue_key, revoke_key
from brokerage.services.limits import FIELDS, set_key_limits


class APIKeys(Resource):
    @extend_schema(
        operation_id="list_api_keys",
        summary="Your API keys",
        parameters=PAGING,
        responses=page_of(APIKeySerializer),
    )
    def get(self, request: Request) -> Response:
        rows = APIKey.objects.filter(customer=customer_of(request))
        return page_response(self, rows, APIKeySerializer, order="-created_at")

    @extend_schema(
        operation_id="create_api_key",
        summary="Make an API key",
        parameters=[IDEMPOTENCY_KEY_OPTIONAL],
        request=NewAPIKeySerializer,
        responses={201: IssuedAPIKeySerializer},
    )
    def post(self, request: Request) -> Response:
        """The answer holds the whole key. It is never shown again, not even to a repeated request."""

        def create(_: str) -> Response:
            wanted = NewAPIKeySerializer(data=request.data)
            wanted.is_valid(raise_exception=True)
            try:
                issued = issue_key(
                    customer=customer_of(request),
                    project=_project(request, wanted.validated_data["project"]),
                    name=wanted.validated_data["name"],
                    mode=APIKey.Mode(wanted.validated_data["mode"]),
                    actor=request.auth.user if isinstance(request.auth, Caller) else None,
                )
            except ModelValidationError as error:
                raise ValidationError(error.message_dict) from error
            issued.key.refresh_from_db()
            shown = APIKeySerializer(issued.key).data | {"key": issued.plaintext}
            return Response(shown, status=status.HTTP_201_CREATED)

        return run_once(
            request, create, required=False, in_transaction=True, redact=lambda shown: shown | {"key": None}
        )


def _project(request: Request, project_id: UUID | None) -> Project | None:
    if project_id is None:
        return None
    project = Project.objects.filter(pk=project_id, customer=customer_of(request)).first()
    if project is None:
        raise ValidationError({"project": "You have no project with this id."})
    return project


class OneAPIKey(Resource):
    @extend_schema(operation_id="get_api_key", summary="One API key", responses=APIKeySerializer)
    def get(self, request: Request, key_id: UUID) -> Response:
        return Response(APIKeySerializer(self._key(request, key_id)).data)

    @extend_schema(
        operation_id="change_api_key_limits",
        summary="Change the limits of an API key",
        request=KeyLimitsSerializer,
        responses=APIKeySerializer,
    )
    @transaction.atomic
    def patch(self, request: Request, key_id: UUID) -> Response:
        """Gateways follow within a second."""
        key = self._key(request, key_id)
        wanted = KeyLimitsSerializer(key, data=request.data, partial=True)
        wanted.is_valid(raise_exception=True)
        actor = request.auth.user if isinstance(request.auth, Caller) else None
        stored = {name: getattr(key, name) for name in FIELDS}
        set_key_limits(key=key, actor=actor, **(stored | wanted.validated_data))
        return Response(APIKeySerializer(key).data)

    @extend_schema(operation_id="revoke_api_key", summary="Revoke an API key", responses={204: None})
    def delete(self, request: Request, key_id: UUID) -> Response:
        """Works from the next second on and cannot be undone. Revoking a revoked key changes nothing."""
        actor = request.auth.user if isinstance(request.auth, Caller) else None
        revoke_key(key=self._key(request, key_id), actor=actor)
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _key(self, request: Request, key_id: UUID) -> APIKey:
        return get_object_or_404(APIKey, pk=key_id, customer=customer_of(request))
