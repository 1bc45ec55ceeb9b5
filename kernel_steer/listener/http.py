"""Calls to a metadata service: plain HTTP, one at a time, no proxies, no redirects."""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime, tzinfo
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import urlsplit

from kernel_steer.listener.base import SourceUnavailable

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
TOKEN_TTL_S = 21_600
# A token is renewed this long before it expires, or after half of its life if that is shorter.
_RENEW_BEFORE_S = 60
_BODY_BYTES_MAX = 65_536


class Answer(NamedTuple):
    status: int
    body: str
    headers: Message  # finds a name in any case


class MetadataClient:
    """`base_url` is http://host[:port][/prefix]. Raises ValueError when it is not."""

    def __init__(self, base_url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the metadata address must be http://host[:port][/prefix], it is {base_url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s

    def call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """`timeout_s` is for each step: connecting, and every wait for bytes. Raises SourceUnavailable."""
        # http.client knows neither proxies nor redirects: this address is never beyond the machine.
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=timeout_s if timeout_s is not None else self._timeout_s
        )
        try:
            connection.request(method, self._prefix + path, body=body, headers=dict(headers))
            response = connection.getresponse()
            text = response.read(_BODY_BYTES_MAX).decode(errors="replace").strip()
            return Answer(response.status, text, response.headers)
        except (OSError, http.client.HTTPException) as error:
            raise SourceUnavailable(f"no answer to {path} ({type(error).__name__})") from error
        finally:
            connection.close()


class TokenClient(MetadataClient):
    """A service that wants a session token with every question: AWS (IMDSv2), Alibaba in hardened mode.

    `header` carries the token; the same name with `-ttl-seconds` asks for one.
    """

    def __init__(
        self, base_url: str, header: str, *, timeout_s: float = TIMEOUT_S, token_ttl_s: int = TOKEN_TTL_S
    ) -> None:
        super().__init__(base_url, timeout_s=timeout_s)
        self._header = header
        self._token_ttl_s = token_ttl_s
        self._token: str | None = None
        self._renew_at = 0.0

    def get(self, path: str) -> str | None:
        """The body, or None for 404: nothing scheduled. Raises SourceUnavailable."""
        for last_try in (False, True):
            answer = self.call("GET", path, {self._header: self._current_token()})
            if answer.status == 200:
                return answer.body
            if answer.status == 404:
                return None
            if answer.status == 401:
                # Expired early, or the service was restarted.
                self._token = None
                if not last_try:
                    continue
            raise SourceUnavailable(f"status {answer.status} for {path}")
        raise AssertionError("unreachable")

    def _current_token(self) -> str:
        if self._token is None or time.monotonic() >= self._renew_at:
            asked_at = time.monotonic()
            answer = self.call(
                "PUT", "/latest/api/token", {f"{self._header}-ttl-seconds": str(self._token_ttl_s)}
            )
            token = answer.body
            if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
                self._token = None
                raise SourceUnavailable(f"no session token (status {answer.status})")
            self._token = token
            self._renew_at = asked_at + max(self._token_ttl_s - _RENEW_BEFORE_S, self._token_ttl_s / 2)
        return self._token


def parse_time(value: object, *, zone: tzinfo = UTC) -> datetime | None:
    """Aware UTC from ISO 8601 or an HTTP date; `zone` is meant where the text names none.

    None for what is no time: the notice alone is reason enough to leave.
    """
    text = str(value).strip()
    parsed = None
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            parsed = parse(text)
        except (ValueError, TypeError, IndexError):
            continue
        break
    if parsed is None:
        logger.warning("notice without a readable time: %.60s", text)
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=zone)).astimezone(UTC)
