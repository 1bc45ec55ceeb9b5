"""Times as a person reads them."""

from __future__ import annotations

from datetime import datetime, timedelta

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def milliseconds(value: float) -> str:
    """1234.5 -> "1,234.5 ms"; more digits where the number is small."""
    digits = 3 if abs(value) < 10 else 1
    return f"{value:,.{digits}f} ms"


def span(length: timedelta) -> str:
    """The two largest units: "2 min 5 s", "3 d 4 h". Below a second "0 s"."""
    left = abs(int(length.total_seconds()))
    parts: list[str] = []
    for seconds, unit in _UNITS:
        count, left = divmod(left, seconds)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break  # "1 h 3 s" would be false precision
    return " ".join(parts[:2]) or "0 s"


def offset(length: timedelta) -> str:
    """How long after the signal: milliseconds up to ten seconds, then whole seconds."""
    seconds = length.total_seconds()
    sign = "-" if seconds < 0 else "+"
    exact = abs(seconds) < 10
    return f"{sign}{milliseconds(abs(seconds) * 1000) if exact else span(length)}"


def ago(moment: datetime, now: datetime) -> str:
    return f"{span(now - moment)} ago" if moment <= now else f"in {span(moment - now)}"


def countdown(deadline: datetime, now: datetime) -> str:
    """What is left until `deadline`, or for how long it has passed."""
    return f"{span(deadline - now)} left" if deadline > now else f"passed {span(now - deadline)} ago"
