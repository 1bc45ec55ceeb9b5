"""Totals of the platform's accounts, so that reading a balance does not sum up their whole history."""

from __future__ import annotations

from ledger.services.calls import call


def advance_totals() -> int:
    """Brings the totals up to now; returns how many changed. Two transactions, as the horizon is to be in the past.

    Writers wait for a moment, until those before them have ended.
    """
    ((horizon,),) = call("SELECT totals_horizon()", [])
    ((changed,),) = call("SELECT totals_advance(%s)", [horizon])
    return int(changed)
