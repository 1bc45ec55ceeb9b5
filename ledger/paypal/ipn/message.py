"""One notification, read from its bytes: in the character set that it names, and no longer than it is."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from urllib.parse import parse_qsl
from zoneinfo import ZoneInfo

# What PayPal sends when its profile was never changed.
DEFAULT_CHARSET = "windows-1252"
MAX_FIELDS = 200
_PACIFIC = ZoneInfo("US/Pacific")
# PayPal's months are English whatever the locale here, so no strptime.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Malformed(ValueError):
    """The message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class IpnMessage:
    """The fields as text. Amounts are PayPal's: `gross` below zero when money went back."""

    fields: dict[str, str]

    def __getattr__(self, name: str) -> str:
        try:
            return self.fields.get(name, "")
        except AttributeError:  # while it is being made
            raise AttributeError(name) from None

    @property
    def reference(self) -> str:
        """Our own id of the purchase, "" in notifications that are not about one of ours."""
        return self.fields.get("invoice") or self.fields.get("custom", "")

    @property
    def capture_id(self) -> str:
        """The payment that it is about: its own, or that which was refunded or reversed."""
        return self.fields.get("parent_txn_id") or self.fields.get("txn_id", "")

    @property
    def is_test(self) -> bool:
        return self.fields.get("test_ipn", "0") not in {"", "0"}

    def amount(self, name: str) -> Decimal:
        """Zero when the field is not there. Raises Malformed."""
        text = self.fields.get(name) or "0"
        try:
            value = Decimal(text)
        except InvalidOperation:
            raise Malformed(f"{name} is no amount") from None
        if not value.is_finite():
            raise Malformed(f"{name} is no amount")
        return value

    @property
    def paid_at(self) -> datetime:
        """PayPal's `20:12:59 Jan 13, 2009 PST`. Raises Malformed."""
        try:
            clock, month, day, year, _ = self.fields.get("payment_date", "").replace(".", "").split()
            hour, minute, second = (int(part) for part in clock.split(":"))
            number = _MONTHS.index(month[:3]) + 1
            local = datetime(int(year), number, int(day.strip(",")), hour, minute, second, tzinfo=_PACIFIC)
        except ValueError:
            raise Malformed("payment_date is no time") from None
        return local.astimezone(UTC)


def read_message(raw: bytes) -> IpnMessage:
    """Raises Malformed. A field that is told twice is refused: two readers could take two values."""
    try:
        charset = dict(_pairs(raw, "ascii", "replace")).get("charset") or DEFAULT_CHARSET
        codecs.lookup(charset)
        pairs = _pairs(raw, charset, "strict")
    except (LookupError, ValueError):
        raise Malformed("it is not in the character set that it names") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise Malformed("a field is told twice")
    if not fields:
        raise Malformed("it is empty")
    return IpnMessage(fields)


def _pairs(raw: bytes, charset: str, errors: str) -> list[tuple[str, str]]:
    return parse_qsl(
        raw.decode("ascii", "strict" if errors == "strict" else "replace"),
        keep_blank_values=True, encoding=charset, errors=errors, max_num_fields=MAX_FIELDS,
    )  # fmt: skip
