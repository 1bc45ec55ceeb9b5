"""Days and months of budgets in time zones that change their clocks, against the calendar itself."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.db import connection
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.django_db

ZONES = ["Europe/Berlin", "America/New_York", "UTC", "Asia/Kolkata", "Australia/Lord_Howe"]
# Clocks that change at midnight: it does not exist, comes twice, or follows 23:59 an hour later.
MIDNIGHT_CHANGES = ["America/Havana", "Africa/Cairo", "Asia/Beirut", "America/Sao_Paulo", "America/Asuncion"]

moments = st.datetimes(datetime(2010, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)).map(  # noqa: DTZ001
    lambda moment: moment.replace(microsecond=0)
)


def window(moment: datetime, period: str, zone: str) -> tuple[datetime, datetime]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM budget_window(%s, %s, %s)", [moment, period, zone])
        start, end = cursor.fetchone()
    return start, end


def days_of(period: str, day: date) -> tuple[date, date]:
    """The first day of the window that has that day, and of the next one."""
    if period == "daily":
        return day, day + timedelta(days=1)
    return day.replace(day=1), (day.replace(day=1) + timedelta(days=32)).replace(day=1)


def first_instant(day: date, zone: ZoneInfo) -> datetime:
    """By bisection: the first second whose local date is `day` or later."""
    noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
    low, high = noon - timedelta(days=2), noon + timedelta(days=1)
    while high - low > timedelta(seconds=1):
        middle = (low + (high - low) / 2).replace(microsecond=0)
        if middle.astimezone(zone).date() >= day:
            high = middle
        else:
            low = middle
    return high


# Nothing is written, so the examples may share a transaction.
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(moments, st.sampled_from(["daily", "monthly"]), st.sampled_from([*ZONES, *MIDNIGHT_CHANGES]))
@example(datetime(2026, 3, 29, 12, tzinfo=UTC), "daily", "Europe/Berlin")
@example(datetime(2026, 10, 25, 0, 30, tzinfo=UTC), "daily", "Europe/Berlin")
@example(datetime(2026, 3, 8, 12, tzinfo=UTC), "monthly", "America/New_York")
@example(datetime(2026, 11, 1, 5, 30, tzinfo=UTC), "daily", "America/New_York")
@example(datetime(2026, 11, 1, 4, 30, tzinfo=UTC), "daily", "America/Havana")  # the first 00:30 of two
@example(datetime(2026, 11, 1, 5, 30, tzinfo=UTC), "daily", "America/Havana")  # the second
@example(datetime(2017, 10, 15, 12, tzinfo=UTC), "daily", "America/Sao_Paulo")  # has no midnight
def test_a_window_begins_and_ends_with_the_local_calendar(moment, period, zone):
    start, end = window(moment, period, zone)
    first, following = days_of(period, moment.astimezone(ZoneInfo(zone)).date())
    assert start <= moment < end
    assert start == first_instant(first, ZoneInfo(zone))
    assert end == first_instant(following, ZoneInfo(zone))


@many
@given(moments, st.sampled_from(["daily", "monthly"]), st.sampled_from([*ZONES, *MIDNIGHT_CHANGES]))
def test_windows_follow_each_other_without_gap_or_overlap(moment, period, zone):
    _, end = window(moment, period, zone)
    following, _ = window(end, period, zone)
    assert following == end
    _, last = window(end - timedelta(microseconds=1), period, zone)
    assert last == end


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", "2026-03-29", 23),
        ("Europe/Berlin", "2026-10-25", 25),
        ("America/New_York", "2026-03-08", 23),
        ("America/New_York", "2026-11-01", 25),
        ("America/New_York", "2026-11-02", 24),
    ],
)
def test_a_day_is_as_long_as_its_clock_says(zone, day, hours):
    noon = datetime.fromisoformat(f"{day}T12:00").replace(tzinfo=ZoneInfo(zone))
    start, end = window(noon, "daily", zone)
    assert end - start == timedelta(hours=hours)
