"""PayPal's REST API: one client of PayPal's own SDK, and what its errors mean.

The SDK knows orders, payments and reports. For disputes and for the check of a signature `MoreApi` asks in
the SDK's way, so that token, timeout and errors are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from apimatic_core.authentication.multiple.single_auth import Single
from apimatic_core.exceptions.auth_validation_exception import AuthValidationException
from apimatic_core.request_builder import RequestBuilder
from apimatic_core.response_handler import ResponseHandler
from apimatic_core.types.parameter import Parameter
from django.conf import settings
from paypalserversdk.api_helper import APIHelper
from paypalserversdk.configuration import Configuration, Environment, Server
from paypalserversdk.controllers.base_controller import BaseController
from paypalserversdk.exceptions.api_exception import ApiException
from paypalserversdk.exceptions.error_exception import ErrorException
from paypalserversdk.http.auth.o_auth_2 import ClientCredentialsAuthCredentials
from paypalserversdk.http.http_method_enum import HttpMethodEnum
from paypalserversdk.paypal_serversdk_client import PaypalServersdkClient
from requests import RequestException

from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable

TIMEOUT_S = 15
# Said of a call whose twin, with the same request id, is still under way: its outcome is not known.
_UNDER_WAY = frozenset({"PREVIOUS_REQUEST_IN_PROGRESS", "DUPLICATE_REQUEST_ID"})


class StubConfiguration(Configuration):
    """The SDK pointed at the loopback PayPal instead of PayPal's sandbox."""

    def get_base_uri(self, server: Server = Server.DEFAULT) -> str:
        return settings.PAYPAL_STUB_URL


class MoreApi(BaseController):
    """Endpoints that the SDK has not got. Answers are plain dictionaries."""

    def call(self, method: str, path: str, *, body: Any = None, **parts: str) -> Any:
        """`parts` fill the {braces} of the path, percent-encoded."""
        request = (
            RequestBuilder()
            .server(Server.DEFAULT)
            .path(path)
            .http_method(method)
            .header_param(Parameter().key("accept").value("application/json"))
            .auth(Single("Oauth2"))
        )
        for name, value in parts.items():
            request.template_param(Parameter().key(name).value(value).should_encode(True))
        if body is not None:
            request.header_param(Parameter().key("Content-Type").value("application/json"))
            request.body_param(Parameter().value(body)).body_serializer(APIHelper.json_serialize)
        handler = ResponseHandler().deserializer(APIHelper.json_deserialize).is_api_response(True)
        handler.local_error("default", "The error response.", ErrorException)
        return self.new_api_call_builder.request(request).response(handler).execute()

    def get_dispute(self, dispute_id: str) -> Any:
        return self.call(HttpMethodEnum.GET, "/v1/customer/disputes/{dispute_id}", dispute_id=dispute_id)

    def verify_webhook_signature(self, body: dict[str, Any]) -> Any:
        return self.call(HttpMethodEnum.POST, "/v1/notifications/verify-webhook-signature", body=body)


def ask(call: Callable[[PaypalServersdkClient], Any]) -> Any:
    """The body of one call's answer; a token that PayPal does not know any more is replaced once.

    Raises GatewayUnavailable and GatewayRefused.
    """
    mode = (settings.PAYPAL_MODE, settings.PAYPAL_STUB_URL)
    credentials = (settings.PAYPAL_CLIENT_ID, settings.PAYPAL_CLIENT_SECRET)
    try:
        return call(_client(*mode, *credentials)).body
    except ApiException as error:
        if error.response_code != 401:
            raise _meaning(error) from None
        _client.cache_clear()
        try:
            return call(_client(*mode, *credentials)).body
        except (ApiException, AuthValidationException, RequestException) as second:
            raise _meaning(second) from None
    except (AuthValidationException, RequestException) as error:
        raise _meaning(error) from None


def ask_more(call: Callable[[MoreApi], Any]) -> Any:
    """As `ask`, of the endpoints that the SDK has not got."""
    return ask(lambda client: call(MoreApi(client.global_configuration)))


@lru_cache(maxsize=1)
def _client(mode: str, stub_url: str, client_id: str, client_secret: str) -> PaypalServersdkClient:
    """Kept, because it keeps the access token."""
    environment = Environment.PRODUCTION if mode == "live" else Environment.SANDBOX
    configuration = StubConfiguration if mode == "stub" else Configuration
    return PaypalServersdkClient(
        config=configuration(
            environment=environment,
            timeout=TIMEOUT_S,
            client_credentials_auth_credentials=ClientCredentialsAuthCredentials(
                o_auth_client_id=client_id, o_auth_client_secret=client_secret
            ),
        )
    )


def _meaning(error: Exception) -> Exception:
    """Only a 4xx about the request itself is a no. All else leaves open what happened."""
    if isinstance(error, AuthValidationException):
        return GatewayUnavailable("PayPal gave no access token: check PAYPAL_CLIENT_ID and its secret")
    if isinstance(error, ApiException) and error.response_code in {400, 403, 404, 422}:
        details = getattr(error, "details", None) or []
        issue = getattr(details[0], "issue", None) if details else None
        issue = issue or getattr(error, "name", None) or f"HTTP {error.response_code}"
        if issue in _UNDER_WAY:
            return GatewayUnavailable(f"PayPal is still at it ({issue})")
        return GatewayRefused(issue, getattr(error, "message", None) or "")
    if isinstance(error, ApiException):
        return GatewayUnavailable(f"PayPal answered {error.response_code}")
    return GatewayUnavailable(f"PayPal did not answer ({type(error).__name__})")
