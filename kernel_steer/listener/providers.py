"""Which source listens on which provider's machines."""

from __future__ import annotations

from collections.abc import Callable

from kernel_steer.listener.aws import AWSMetadata
from kernel_steer.listener.azure import AzureMetadata
from kernel_steer.listener.base import Source
from kernel_steer.listener.gcp import GCPMetadata
from kernel_steer.listener.termination_time import AlibabaMetadata, TencentMetadata

SOURCES: dict[str, Callable[[str, str], Source]] = {
    "aws": AWSMetadata,
    "gcp": GCPMetadata,
    "azure": AzureMetadata,
    "alibaba": AlibabaMetadata,
    "tencent": TencentMetadata,
}
# A machine that nobody reclaims, or whose only word is SIGTERM (RunPod, Kubernetes).
NO_PROVIDER = "none"


def make_source(provider: str, base_url: str, instance: str) -> Source:
    """`provider` is a name of SOURCES; `instance` is what notices are filed under."""
    return SOURCES[provider](base_url, instance)
