"""What needs no key: applying for the pilot, the health of the platform, the documentation."""

from __future__ import annotations

from csp.decorators import csp_update
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response

from apex.api.base import Resource
from apex.api.serializers import HealthSerializer, PilotApplicationSerializer, ReceivedSerializer
from apex.health.matrix import FAIL
from apex.health.views import health_matrix
from brokerage.services.customers import apply_for_pilot


class PilotApplications(Resource):
    authentication_classes = []
    permission_classes = []

    @extend_schema(
        operation_id="apply_for_pilot",
        summary="Apply for the pilot",
        request=PilotApplicationSerializer,
        responses={202: ReceivedSerializer},
        auth=[],
    )
    def post(self, request: Request) -> Response:
        """An address has one open application: sending it again changes nothing and is answered alike."""
        application = PilotApplicationSerializer(data=request.data)
        application.is_valid(raise_exception=True)
        apply_for_pilot(**application.validated_data)
        return Response({"status": "received"}, status=status.HTTP_202_ACCEPTED)


@method_decorator(never_cache, name="dispatch")
class HealthMatrix(Resource):
    authentication_classes = []
    permission_classes = []
    throttle_classes = []  # a flood of polls costs one run a second

    @extend_schema(
        operation_id="health_matrix",
        summary="Live state of every part",
        responses={200: HealthSerializer, 503: HealthSerializer},
        auth=[],
    )
    def get(self, request: Request) -> Response:
        """Every poll runs the checks. The whole is as well as its worst part; `fail` answers 503."""
        report = health_matrix().poll()
        response = Response(report.as_json(), status=503 if report.status == FAIL else 200)
        response._has_been_logged = True  # type: ignore[attr-defined]
        return response


@require_safe
@csp_update({"style-src": ["'unsafe-inline'"]})
def api_docs(request: HttpRequest) -> HttpResponse:
    """Swagger UI from our own static files. It writes its own styles, so they are allowed here only."""
    return render(request, "api_docs.html")
