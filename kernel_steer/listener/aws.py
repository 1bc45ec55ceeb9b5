"""AWS: the instance metadata service, version 2 (IMDSv2), and its spot interruption notice.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

from kernel_steer.listener.base import Notice, SourceUnavailable

logger = logging.getLogger(__name__)

TOKEN_TTL_S = 21_600
# A token is renewed this long before it expires, or after half of its life if that is shorter.
_RENEW_BEFORE_S = 60
# Rebalance is advice and often wrong; asking rarely spares the service's small packet budget.
_REBALANCE_EVERY_S = 30.0
_BODY_BYTES_MAX = 65_536
_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name


class AWSMetadata:
    """A Source. `base_url` may carry a path prefix; `instance` is what notices are filed under."""

    name = "aws"

    def __init__(
        self, base_url: str, instance: str, *, timeout_s: float = 2.0, token_ttl_s: int = TOKEN_TTL_S
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the metadata address must be http://host[:port][/prefix], it is {base_url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._instance = instance
        self._timeout_s = timeout_s
        self._token_ttl_s = token_ttl_s
        self._token: str | None = None
        self._token_renew_at = 0.0
        self._rebalance_at = 0.0
        self._rebalance_seen: str | None = None

    def poll(self) -> Sequence[Notice]:
        self._look_at_rebalance()
        body = self._get("/latest/meta-data/spot/instance-action")
        if body is None:
            return []
        try:
            announced = json.loads(body)
            action = announced["action"]
        except (ValueError, KeyError, TypeError):
            raise SourceUnavailable(
                "spot/instance-action is not the JSON object that AWS documents"
            ) from None
        if not isinstance(action, str) or not 0 < len(action) <= 30:
            raise SourceUnavailable("spot/instance-action has no usable action")
        if self._is_foreign(announced.get("instance-id")):
            return []
        return [Notice("aws", action, _parse_time(announced.get("time")), self._instance)]

    def _is_foreign(self, named: object) -> bool:
        """AWS names no instance here; services that stand in for it may, and may mean another one."""
        if named is None or named == self._get("/latest/meta-data/instance-id"):
            return False
        logger.warning("notice for another instance ignored: %.60s", named)
        return True

    def _look_at_rebalance(self) -> None:
        if time.monotonic() < self._rebalance_at:
            return
        self._rebalance_at = time.monotonic() + _REBALANCE_EVERY_S
        advice = self._get("/latest/meta-data/events/recommendations/rebalance")
        if advice is not None and advice != self._rebalance_seen:
            self._rebalance_seen = advice
            logger.info("rebalance recommended (advice only, nothing is moved): %.120s", advice)

    def _get(self, path: str) -> str | None:
        """The body, or None for 404: nothing scheduled."""
        for last_try in (False, True):
            status, body = self._call("GET", path, {_TOKEN: self._current_token()})
            if status == 200:
                return body
            if status == 404:
                return None
            if status == 401:
                # Expired early, or the service was restarted.
                self._token = None
                if not last_try:
                    continue
            raise SourceUnavailable(f"status {status} for {path}")
        raise AssertionError("unreachable")

    def _current_token(self) -> str:
        if self._token is None or time.monotonic() >= self._token_renew_at:
            asked_at = time.monotonic()
            status, body = self._call(
                "PUT", "/latest/api/token", {f"{_TOKEN}-ttl-seconds": str(self._token_ttl_s)}
            )
            if status != 200 or not body.isascii() or not body.isprintable() or not body:
                self._token = None
                raise SourceUnavailable(f"no session token (status {status})")
            self._token = body
            self._token_renew_at = asked_at + max(self._token_ttl_s - _RENEW_BEFORE_S, self._token_ttl_s / 2)
        return self._token

    def _call(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        # http.client knows neither proxies nor redirects: this address is never beyond the machine.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, self._prefix + path, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read(_BODY_BYTES_MAX).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            raise SourceUnavailable(f"no answer to {path} ({type(error).__name__})") from error
        finally:
            connection.close()


def _parse_time(value: object) -> datetime | None:
    """Aware UTC, or None for what is no time: the action alone is reason enough to leave."""
    try:
        parsed = datetime.fromisoformat(str(value))
    except ValueError:
        logger.warning("notice without a readable time: %.60s", value)
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).astimezone(UTC)
