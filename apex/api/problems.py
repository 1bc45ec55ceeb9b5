"""RFC 9457 problem+json for everything that goes wrong under /v1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

CONTENT_TYPE = "application/problem+json"

# `type` is what clients branch on: stable names, explained in docs/api.md.
_CODES = {
    400: "bad-request",
    401: "unauthorized",
    402: "insufficient-credit",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    406: "not-acceptable",
    409: "conflict",
    413: "too-large",
    415: "unsupported-media-type",
    422: "unprocessable",
    429: "rate-limited",
    500: "internal-error",
    502: "upstream-failed",
    503: "unavailable",
}


class Problem(exceptions.APIException):
    """A refusal with a status, a stable code and a sentence for the caller."""

    def __init__(
        self, status: int, detail: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(detail)
        self.status_code = status
        self.problem_code = code
        self.headers = dict(headers or {})


def is_api(request: HttpRequest) -> bool:
    return request.path_info.startswith("/v1/")


def problem_body(
    request: HttpRequest,
    status: int,
    *,
    detail: str,
    code: str | None = None,
    errors: Sequence[dict[str, str]] = (),
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": f"urn:apex:problem:{code or _CODES.get(status, 'error')}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "request_id": getattr(request, "request_id", ""),
    }
    return body | {"errors": list(errors)} if errors else body


def problem_response(
    request: HttpRequest, status: int, *, detail: str, code: str | None = None
) -> HttpResponse:
    """For places outside of the REST framework."""
    return JsonResponse(
        problem_body(request, status, detail=detail, code=code), status=status, content_type=CONTENT_TYPE
    )


def handle_exception(error: Exception, context: dict[str, Any]) -> Response | None:
    """The REST framework's EXCEPTION_HANDLER. None lets Django log the error and call handler500."""
    if isinstance(error, Http404):
        error = exceptions.NotFound("There is nothing at this address.")
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    elif isinstance(error, RequestDataTooBig):
        error = Problem(413, "The body is too large.")
    if not isinstance(error, exceptions.APIException):
        return None
    set_rollback()
    request = context["request"]._request
    code = getattr(error, "problem_code", None)
    if isinstance(error, exceptions.ValidationError):
        errors = list(_pointers(error.get_full_details(), ""))
        body = problem_body(
            request, 400, detail="Some of the input is not valid.", code="invalid-input", errors=errors
        )
    else:
        body = problem_body(request, error.status_code, detail=_text(error.detail), code=code)
    return Response(body, status=body["status"], headers=_headers(error), content_type=CONTENT_TYPE)


def _text(detail: Any) -> str:
    return str(detail) if isinstance(detail, str) else "The request was refused."


def _headers(error: exceptions.APIException) -> dict[str, str]:
    headers = dict(getattr(error, "headers", {}))
    if challenge := getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    return headers


def _pointers(details: Any, at: str) -> Iterator[dict[str, str]]:
    """Flattens the framework's nested errors into JSON pointers (RFC 6901) into the request body."""
    if (
        isinstance(details, dict)
        and set(details) == {"message", "code"}
        and isinstance(details["message"], str)
    ):
        yield {"pointer": at, "code": str(details["code"]), "detail": details["message"]}
    elif isinstance(details, dict):
        for name, inner in details.items():
            step = "" if name == "non_field_errors" else "/" + str(name).replace("~", "~0").replace("/", "~1")
            yield from _pointers(inner, at + step)
    elif isinstance(details, list):
        for inner in details:
            yield from _pointers(inner, at)
