"""What is sold and how the platform fares: models, evictions."""

from __future__ import annotations

from django.db.models import Count, Prefetch, Q
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from apex.api.base import Resource, page_response
from apex.api.callers import customer_of
from apex.api.schema import PAGING, page_of
from apex.api.serializers import EvictionSerializer, ModelSerializer
from brokerage.models import ModelPrice, Node, Reroute, ServedModel


class Models(Resource):
    @extend_schema(
        operation_id="list_models",
        summary="Models you can use",
        parameters=PAGING,
        responses=page_of(ModelSerializer),
    )
    def get(self, request: Request) -> Response:
        """Models with their price in your currency and how many nodes serve them right now."""
        prices = ModelPrice.objects.filter(
            currency=customer_of(request).currency, valid__contains=timezone.now()
        )
        served = (
            ServedModel.objects.filter(enabled=True)
            .annotate(ready_nodes=Count("nodes", filter=Q(nodes__state=Node.State.READY)))
            .prefetch_related(Prefetch("prices", queryset=prices))
        )
        return page_response(self, served, ModelSerializer, order="name")


class Evictions(Resource):
    @extend_schema(
        operation_id="list_evictions",
        summary="Machines taken back",
        parameters=PAGING,
        responses=page_of(EvictionSerializer),
    )
    def get(self, request: Request) -> Response:
        """Each time traffic was flipped away from a machine that its provider took back, newest first."""
        return page_response(
            self, Reroute.objects.select_related("node"), EvictionSerializer, order="-signal_at"
        )
