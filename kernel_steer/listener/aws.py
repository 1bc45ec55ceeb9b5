"""AWS: the instance metadata service, version 2 (IMDSv2), and its spot interruption notice.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

from kernel_steer.listener.base import Notice, SourceUnavailable
from kernel_steer.listener.http import TIMEOUT_S, TOKEN_TTL_S, TokenClient, parse_time

logger = logging.getLogger(__name__)

# The service has a small packet budget, shared with DNS and NTP, so what is of less use is asked rarely.
# Rebalance is advice and often wrong.
_REBALANCE_EVERY_S = 30.0
# The legacy item says the same as spot/instance-action, which all of today's instances have.
_LEGACY_EVERY_S = 10.0


class AWSMetadata:
    """A Source. `base_url` may carry a path prefix; `instance` is what notices are filed under."""

    name = "aws"
    interval_s = 2.0

    def __init__(
        self, base_url: str, instance: str, *, timeout_s: float = TIMEOUT_S, token_ttl_s: int = TOKEN_TTL_S
    ) -> None:
        self._client = TokenClient(
            base_url, "X-aws-ec2-metadata-token", timeout_s=timeout_s, token_ttl_s=token_ttl_s
        )
        self._instance = instance
        self._rebalance_at = 0.0
        self._rebalance_seen: str | None = None
        self._legacy_at = 0.0

    def poll(self) -> Sequence[Notice]:
        self._look_at_rebalance()
        body = self._client.get("/latest/meta-data/spot/instance-action")
        if body is None:
            return self._legacy_notice()
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
        return [Notice("aws", action, parse_time(announced.get("time")), self._instance)]

    def _legacy_notice(self) -> Sequence[Notice]:
        """spot/termination-time: a bare time. AWS warns that it may hold something else, which means nothing."""
        if time.monotonic() < self._legacy_at:
            return []
        self._legacy_at = time.monotonic() + _LEGACY_EVERY_S
        body = self._client.get("/latest/meta-data/spot/termination-time")
        deadline = parse_time(body) if body else None
        if deadline is None:
            return []
        self._legacy_at = 0.0  # stays in sight until it is taken back
        return [Notice("aws", "terminate", deadline, self._instance)]

    def acknowledge(self, notice: Notice) -> None:
        """AWS has no such call."""

    def _is_foreign(self, named: object) -> bool:
        """AWS names no instance here; services that stand in for it may, and may mean another one."""
        if named is None or named == self._client.get("/latest/meta-data/instance-id"):
            return False
        logger.warning("notice for another instance ignored: %.60s", named)
        return True

    def _look_at_rebalance(self) -> None:
        if time.monotonic() < self._rebalance_at:
            return
        self._rebalance_at = time.monotonic() + _REBALANCE_EVERY_S
        advice = self._client.get("/latest/meta-data/events/recommendations/rebalance")
        if advice is not None and advice != self._rebalance_seen:
            self._rebalance_seen = advice
            logger.info("rebalance recommended (advice only, nothing is moved): %.120s", advice)
