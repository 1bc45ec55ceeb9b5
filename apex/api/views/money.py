"""Credits: what there is, what is held, what was booked, and buying more."""

from __future__ import annotations

from uuid import UUID

from django.shortcuts import get_object_or_404
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param

from apex.api.base import Resource, page_response, page_size, position
from apex.api.callers import Caller, customer_of
from apex.api.idempotency import KEY_REUSED, hash_of, run_once
from apex.api.problems import Problem
from apex.api.schema import IDEMPOTENCY_KEY, PAGING, page_of
from apex.api.serializers import (
    BalanceSerializer,
    EntrySerializer,
    HoldSerializer,
    NewTopUpSerializer,
    TopUpSerializer,
    balance_json,
)
from apex.portal.purchases import PurchaseFailed, start_purchase
from apex.portal.selectors import holds_of, top_ups_of
from ledger.errors import IdempotencyConflict
from ledger.selectors import entries_page, open_grants, wallet


class Balance(Resource):
    @extend_schema(operation_id="get_balance", summary="Your credits", responses=BalanceSerializer)
    def get(self, request: Request) -> Response:
        """`available` is what new answers can draw on: posted less held, without credit that has expired.

        `granted` is the part of `posted` that has terms of its own, listed in `grants` in the order in which answers
        draw on it; the rest was bought and comes last. `pending` was paid, and PayPal keeps it for now.
        """
        purse = wallet(customer_of(request).wallet_code)
        return Response(balance_json(purse, open_grants(account_id=purse.account_id)))


class Entries(Resource):
    @extend_schema(
        operation_id="list_entries",
        summary="Every movement of your credits",
        parameters=PAGING,
        responses=page_of(EntrySerializer),
    )
    def get(self, request: Request) -> Response:
        """Newest first. A purchase is positive, a charge negative; their sum is `posted` of the balance."""
        before = position(request)
        page = entries_page(
            account_id=wallet(customer_of(request).wallet_code).account_id,
            before=before,
            limit=page_size(request),
        )
        older = page.next_cursor and replace_query_param(
            request.build_absolute_uri(), "cursor", str(page.next_cursor)
        )
        return Response(
            {"next": older, "previous": None, "results": EntrySerializer(page.entries, many=True).data}
        )


class Holds(Resource):
    @extend_schema(
        operation_id="list_holds",
        summary="Credit set aside for running answers",
        parameters=PAGING,
        responses=page_of(HoldSerializer),
    )
    def get(self, request: Request) -> Response:
        return page_response(self, holds_of(customer_of(request)), HoldSerializer, order="-id")


class TopUps(Resource):
    @extend_schema(
        operation_id="list_topups",
        summary="Your purchases",
        parameters=PAGING,
        responses=page_of(TopUpSerializer),
    )
    def get(self, request: Request) -> Response:
        return page_response(self, top_ups_of(customer_of(request)), TopUpSerializer, order="-id")

    @extend_schema(
        operation_id="create_topup",
        summary="Buy credits",
        parameters=[IDEMPOTENCY_KEY],
        request=NewTopUpSerializer,
        responses={201: TopUpSerializer},
    )
    def post(self, request: Request) -> Response:
        """Starts a purchase. Send the payer to `approve_url`; credits come once PayPal has the money."""

        def start(key: str) -> Response:
            wanted = NewTopUpSerializer(data=request.data)
            wanted.is_valid(raise_exception=True)
            customer = customer_of(request)
            amount = wanted.validated_data["amount"]
            if amount.currency.code != customer.currency:
                raise Problem(422, f"Your credits are in {customer.currency}.", code="wrong-currency")
            assert isinstance(request.auth, Caller)
            scope = request.auth.scope
            try:
                top_up = start_purchase(
                    customer=customer, amount=amount, actor=scope, key=f"{scope}:{hash_of(key)}"
                )
            except PurchaseFailed as failure:
                raise Problem(502, str(failure), code="payment-provider") from failure
            except IdempotencyConflict as error:
                raise Problem(
                    422, "This Idempotency-Key was used for another purchase.", code=KEY_REUSED
                ) from error
            return Response(TopUpSerializer(top_up).data, status=status.HTTP_201_CREATED)

        return run_once(request, start)


class OneTopUp(Resource):
    @extend_schema(operation_id="get_topup", summary="One purchase", responses=TopUpSerializer)
    def get(self, request: Request, top_up_id: UUID) -> Response:
        top_up = get_object_or_404(top_ups_of(customer_of(request)), public_id=top_up_id)
        return Response(TopUpSerializer(top_up).data)
