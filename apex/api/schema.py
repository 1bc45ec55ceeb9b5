"""The OpenAPI document: what drf-spectacular cannot see by itself."""

from __future__ import annotations

from functools import cache
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, inline_serializer
from rest_framework import serializers

_SAY = {
    "400": "The request is malformed or some input is not valid; `errors` says which.",
    "401": "No key, or one that is unknown, revoked or malformed.",
    "403": "Signed in to the portal, but without a team or a CSRF token.",
    "404": "There is no such thing, or it is not yours.",
    "409": "A request with this Idempotency-Key is still at work, or what is to be made exists.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "422": "This Idempotency-Key was used for another request, or the currency is not that of the credits.",
    "429": "Too many requests; Retry-After says when to come back.",
    "502": "The payment provider did not do its part; nothing was charged.",
}


def _idempotency_key(required: bool) -> OpenApiParameter:
    return OpenApiParameter(
        "Idempotency-Key",
        OpenApiTypes.STR,
        OpenApiParameter.HEADER,
        required=required,
        description="1 to 255 printable characters, for example a UUID. Sending the request again with the same"
        " key returns the first answer with `Idempotent-Replayed: true`.",
    )


IDEMPOTENCY_KEY = _idempotency_key(True)
IDEMPOTENCY_KEY_OPTIONAL = _idempotency_key(False)


PAGING = [
    OpenApiParameter(
        "cursor", OpenApiTypes.STR, description="From `next` or `previous` of an earlier page; opaque."
    ),
    OpenApiParameter(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": 200, "default": 50},
        description="Rows on a page.",
    ),
]


@cache
def page_of(serializer: type[serializers.BaseSerializer[Any]]) -> serializers.BaseSerializer[Any]:
    """The envelope of a list, for the document only."""
    name = serializer.__name__.removesuffix("Serializer")
    return inline_serializer(
        f"{name}Page",
        {
            "next": serializers.URLField(allow_null=True),
            "previous": serializers.URLField(allow_null=True),
            "results": serializer(many=True),
        },
    )


class BearerKeyScheme(OpenApiAuthenticationExtension):
    target_class = "apex.api.callers.BearerKey"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {
            "type": "http",
            "scheme": "bearer",
            "description": "A key of the portal: apx_live_… or apx_test_…",
        }


class PortalSessionScheme(OpenApiAuthenticationExtension):
    target_class = "apex.api.callers.PortalSession"
    name = "portalSession"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {
            "type": "apiKey",
            "in": "cookie",
            "name": "sessionid",
            "description": "The portal's own pages.",
        }


_PROBLEM = {
    "type": "object",
    "description": "RFC 9457. Branch on `type`.",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "request_id": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["pointer", "code", "detail"],
                "properties": {
                    "pointer": {
                        "type": "string",
                        "description": "JSON pointer (RFC 6901) into the request body.",
                    },
                    "code": {"type": "string"},
                    "detail": {"type": "string"},
                },
            },
        },
    },
}


def add_problems(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """POSTPROCESSING_HOOK: every operation names the errors that it can really answer with."""
    result["components"]["schemas"]["Problem"] = _PROBLEM
    for path, operations in result["paths"].items():
        for operation in operations.values():
            for code in _problems_of(path, operation):
                operation["responses"].setdefault(
                    code,
                    {
                        "description": _SAY[code],
                        "content": {
                            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                        },
                    },
                )
            operation["responses"] = dict(sorted(operation["responses"].items()))
    return result


def _problems_of(path: str, operation: dict[str, Any]) -> set[str]:
    if operation["operationId"] == "health_matrix":
        return set()
    parameters = {parameter["name"] for parameter in operation.get("parameters", ())}
    problems = {"400", "429"}
    # `{}` stands for "no authentication" and is the only entry of public operations.
    if any(operation.get("security", ())):
        problems |= {"401", "403"}
    if "{" in path or "cursor" in parameters:
        problems.add("404")
    if "requestBody" in operation:
        problems |= {"413", "415"}
    if "Idempotency-Key" in parameters:
        problems |= {"409", "422"}
    if operation["operationId"] in {"create_budget", "change_budget", "set_low_balance_rule"}:
        problems.add("422")
    if operation["operationId"] == "archive_project":
        problems.add("409")
    if operation["operationId"] == "create_topup":
        problems.add("502")
    return problems
