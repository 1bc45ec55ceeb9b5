"""What evictions cost the platform: counted once, per leg, for the provider that took its node away."""

import dataclasses
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.urls import reverse

from brokerage.losses import losses_by_provider
from brokerage.models import LegCost
from kernel_steer.admission import LegReport
from tests.brokerage import factories
from tests.brokerage.broker import admit, answer_for, orm


async def test_losses_are_booked_with_the_usage_and_told_by_provider(admission, world):
    now = datetime.now(UTC)

    def fleet() -> None:
        factories.make_node("spot", provider="aws", zone="us-east-1a")

    await orm(fleet)
    ticket = await admit(admission, world)
    legs = [LegReport(1, "spot", 80, 15, "reset"), LegReport(2, "node-b", 95, 25, "completed", 95, "spot")]
    answer = answer_for(ticket, legs=legs, started_at=now, finished_at=now)
    for _ in range(2):
        await admission.settle(answer)
    whole = await admit(admission, world)
    await admission.settle(answer_for(whole, legs=legs[:1], started_at=now, finished_at=now))
    booked = await orm(
        lambda: list(LegCost.objects.order_by("pk").values_list("number", "lost_tokens", "lost_to"))
    )
    assert sorted(booked) == [(1, 0, ""), (1, 0, ""), (2, 95, "spot")]
    [loss] = await orm(lambda: losses_by_provider(timedelta(days=1)))
    assert dataclasses.astuple(loss) == ("aws", "us-east-1a", "USD", 1, 1, 95, Decimal("0.009500000"))


@pytest.mark.django_db
def test_the_back_office_shows_them(client):
    client.force_login(factories.make_staff())
    page = reverse("admin:brokerage_legcost_changelist")
    assert "Nothing." in client.get(page).text
    customer = factories.make_customer()
    price, now = factories.make_price(factories.make_model()), datetime.now(UTC)
    usage = factories.make_usage(customer, price, started_at=now, finished_at=now)
    LegCost.objects.create(
        usage=usage, number=2, node="b", prompt_tokens=95, completion_tokens=5, ended="completed",
        lost_tokens=95, lost_to="gone",
    )  # fmt: skip
    shown = client.get(page).text
    assert "What was lost with nodes" in shown
    assert "unknown" in shown
    assert "<td>95</td>" in shown
