"""Models, prices and nodes that staff announce."""

from decimal import Decimal

import pytest
from django.core.exceptions import ValidationError

from brokerage.models import ModelPrice
from brokerage.services.catalogue import publish_model, register_node, set_price
from tests.brokerage.factories import audit_actions, in_threads, make_model, make_price


@pytest.mark.django_db
def test_publishing_again_changes_nothing():
    first = publish_model(name="gemma", context_tokens=2048, actor="test")
    again = publish_model(name="gemma", context_tokens=4096, actor="test")
    assert (again.pk, again.context_tokens) == (first.pk, 2048)
    assert audit_actions() == ["model.published"]


@pytest.mark.django_db
def test_the_price_in_force_stays_and_another_one_follows_it_without_a_gap():
    model = make_model()
    first = make_price(model, completion="0.0000006")
    assert make_price(model, completion="0.0000006") == first
    second = make_price(model, completion="0.0000007")
    first.refresh_from_db()
    assert first.valid.upper == second.valid.lower
    assert audit_actions().count("price.set") == 2


@pytest.mark.django_db
def test_a_negative_price_is_refused():
    with pytest.raises(ValidationError, match="negative"):
        set_price(
            served_model=make_model(), prompt_rate=Decimal(-1), completion_rate=Decimal(0), actor="test"
        )


@pytest.mark.django_db
def test_a_rate_with_too_many_places_is_refused_by_field():
    with pytest.raises(ValidationError) as caught:
        set_price(
            served_model=make_model(), prompt_rate=Decimal("1e-13"), completion_rate=Decimal(0), actor="test"
        )
    assert list(caught.value.message_dict) == ["prompt_rate"]


def test_prices_set_at_once_follow_one_another(fresh_database):
    model = make_model()
    in_threads(6, lambda number: make_price(model, completion=f"0.000000{number + 1}"))
    prices = list(ModelPrice.objects.order_by("valid"))
    assert len(prices) == 6
    assert [price.valid.upper for price in prices[:-1]] == [price.valid.lower for price in prices[1:]]
    assert prices[-1].valid.upper is None


@pytest.mark.django_db
def test_registering_a_node_again_changes_nothing():
    model = make_model()
    first = register_node(name="node-a", served_model=model, zone="z1", actor="test")
    assert register_node(name="node-a", served_model=model, zone="z2", actor="test") == first
    first.refresh_from_db()
    assert (first.zone, first.state) == ("z1", "expected")
    assert audit_actions().count("node.registered") == 1
