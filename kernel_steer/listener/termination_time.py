"""Providers that name a bare time and nothing else: Alibaba Cloud and Tencent Cloud."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, timedelta, timezone, tzinfo

from kernel_steer.listener.base import Notice, SourceUnavailable
from kernel_steer.listener.http import TIMEOUT_S, TOKEN_TTL_S, MetadataClient, TokenClient, parse_time


class AlibabaMetadata:
    """https://www.alibabacloud.com/help/en/ecs/user-guide/query-the-interruption-events-of-preemptible-instances

    A session token as on AWS, and a time in UTC about five minutes ahead.
    """

    name = "alibaba"
    interval_s = 5.0

    def __init__(
        self, base_url: str, instance: str, *, timeout_s: float = TIMEOUT_S, token_ttl_s: int = TOKEN_TTL_S
    ) -> None:
        self._client = TokenClient(
            base_url, "X-aliyun-ecs-metadata-token", timeout_s=timeout_s, token_ttl_s=token_ttl_s
        )
        self._instance = instance

    def poll(self) -> Sequence[Notice]:
        body = self._client.get("/latest/meta-data/instance/spot/termination-time")
        return _notices(self.name, body, self._instance, zone=UTC)

    def acknowledge(self, notice: Notice) -> None:
        """Alibaba has no such call."""


class TencentMetadata:
    """https://www.tencentcloud.com/document/product/213/37970

    The time is Beijing's and does not say so: "2018-08-18 12:05:33".
    """

    name = "tencent"
    interval_s = 5.0
    _BEIJING = timezone(timedelta(hours=8))

    def __init__(self, base_url: str, instance: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._client = MetadataClient(base_url, timeout_s=timeout_s)
        self._instance = instance

    def poll(self) -> Sequence[Notice]:
        answer = self._client.call("GET", "/latest/meta-data/spot/termination-time", {})
        if answer.status not in {200, 404}:
            raise SourceUnavailable(f"status {answer.status} for spot/termination-time")
        body = answer.body if answer.status == 200 else None
        return _notices(self.name, body, self._instance, zone=self._BEIJING)

    def acknowledge(self, notice: Notice) -> None:
        """Tencent has no such call."""


def _notices(source: str, body: str | None, instance: str, *, zone: tzinfo) -> Sequence[Notice]:
    if body is None:
        return []
    deadline = parse_time(body, zone=zone)
    if deadline is None:
        # An error page, most likely: here the time is all that there is of a notice.
        raise SourceUnavailable("spot/termination-time is no time")
    return [Notice(source, "terminate", deadline, instance)]
