"""Reads settings from the environment and names every problem in one clear line each."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import NoReturn
from urllib.parse import urlsplit


class Env:
    """Collects values and complaints; `finish()` ends the process when there is a complaint.

    Collecting first means that an operator sees all mistakes of a deployment at once
    instead of one per restart. Values are never printed: they may be secrets.
    """

    def __init__(
        self, environ: Mapping[str, str] | None = None, fallback: Mapping[str, str] | None = None
    ) -> None:
        """`fallback` holds values that hold where the environment has none."""
        self._environ = os.environ if environ is None else environ
        self._fallback = fallback or {}
        self.problems: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        """Returns the variable, else the default; without a default a missing one is a problem."""
        value = self._environ.get(name, "").strip() or self._fallback.get(name, "")
        if value:
            return value
        if default is None:
            self.problems.append(f"{name} is not set")
            return ""
        return default

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        raw = self.text(name, str(default))
        try:
            value = int(raw)
        except ValueError:
            self.problems.append(f"{name} must be a whole number")
            return default
        if not low <= value <= high:
            self.problems.append(f"{name} must be between {low} and {high}")
            return default
        return value

    def ports(self, name: str, default: str) -> tuple[int, int]:
        """A range of TCP ports as `FIRST-LAST`."""
        first, _, last = self.text(name, default).partition("-")
        if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= 65535:
            return int(first), int(last)
        self.problems.append(f"{name} must be FIRST-LAST, for instance {default}")
        return 1, 65535

    def amount(self, name: str, default: Decimal) -> Decimal:
        """A sum of money above zero, without its currency."""
        given = self.text(name, f"{default:f}")
        if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", given) or not Decimal(given):
            self.problems.append(f"{name} must be an amount above zero, like 1000 or 250.50")
            return default
        return Decimal(given)

    def boolean(self, name: str, default: bool) -> bool:
        raw = self.text(name, "true" if default else "false").lower()
        if raw in {"1", "true", "yes", "on"}:
            return True
        if raw in {"0", "false", "no", "off"}:
            return False
        self.problems.append(f"{name} must be true or false")
        return default

    def choice(self, name: str, default: str, allowed: Iterable[str]) -> str:
        options = list(allowed)
        value = self.text(name, default)
        if value not in options:
            self.problems.append(f"{name} must be one of {', '.join(options)}")
            return default
        return value

    def items(self, name: str, default: str) -> list[str]:
        """A comma-separated list."""
        return [item.strip() for item in self.text(name, default).split(",") if item.strip()]

    def networks(self, name: str, default: str) -> list[str]:
        """A comma-separated list of networks, such as 10.0.0.0/8."""
        networks = self.items(name, default)
        try:
            return [str(ipaddress.ip_network(network)) for network in networks]
        except ValueError as error:
            self.problems.append(f"{name} must be a list of networks such as 10.0.0.0/8: {error}")
            return []

    def url(self, name: str, default: str | None, schemes: Iterable[str]) -> str:
        """One address. A unix socket has no host, and PostgreSQL may name its own in the query."""
        value = self.text(name, default)
        allowed = list(schemes)
        if value and not _is_url(value, allowed):
            wanted = " or ".join(f"{scheme}://" for scheme in allowed)
            self.problems.append(f"{name} must be a URL that starts with {wanted} and names a host")
            return ""
        return value

    def finish(self) -> None:
        if self.problems:
            fail(self.problems)


def _is_url(value: str, schemes: Iterable[str]) -> bool:
    try:
        parts = urlsplit(value)
        _ = parts.port  # a port that is no number raises
    except ValueError:
        return False
    has_host = bool(parts.hostname) or parts.scheme == "unix" or "host=" in parts.query
    return parts.scheme in schemes and has_host and not any(character.isspace() for character in value)


def fail(problems: Iterable[str]) -> NoReturn:
    for problem in dict.fromkeys(problems):
        print(f"apex: configuration: {problem}", file=sys.stderr)
    sys.exit(78)  # EX_CONFIG of sysexits.h
