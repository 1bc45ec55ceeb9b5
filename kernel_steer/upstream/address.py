"""Which addresses a gateway connects to for a name that staff have typed.

A name can be made to mean anything, also between two look-ups: so the addresses that were looked up are checked,
and exactly one of those is connected to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

# They give a machine's credentials to whoever asks from it. Never allowed, whatever the operator says: link-local
# (AWS, Google, Azure, Tencent and others), AWS by IPv6, Azure's wire server, Alibaba, Oracle.
_METADATA = tuple(
    ipaddress.ip_network(network)
    for network in (
        "169.254.0.0/16",
        "fe80::/10",
        "fd00:ec2::254/128",
        "168.63.129.16/32",
        "100.100.100.200/32",
        "192.0.0.192/32",
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(ValueError):
    """The message names the address and why it is not connected to."""


def allowed(addresses: Iterable[str], *, private_networks: Sequence[str] = ()) -> list[str]:
    """Those of the numeric addresses that may be connected to, in their order. Raises AddressRefused for none."""
    networks = [ipaddress.ip_network(network) for network in private_networks]
    good: list[str] = []
    refusals: list[str] = []
    for text in addresses:
        why = _why_not(_meant(ipaddress.ip_address(text.partition("%")[0])), networks)
        if why is None:
            good.append(text)
        else:
            refusals.append(f"{text} {why}")
    if not good:
        raise AddressRefused("; ".join(dict.fromkeys(refusals)) or "it has no address")
    return good


def _meant(address: IPAddress) -> IPAddress:
    """The IPv4 address inside one of the ways to write it as IPv6."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _why_not(
    address: IPAddress, private_networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]
) -> str | None:
    if any(address in network for network in _METADATA):
        return "is a metadata service"
    if any(address in network for network in private_networks):
        return None
    if address.is_loopback:
        return "is this machine itself"
    if address.is_multicast or not address.is_global:
        return "is not a public address"
    return None
