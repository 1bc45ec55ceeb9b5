"""Limits of a key as staff set them."""

import pytest
from django.core.exceptions import ValidationError
from django.urls import reverse

from brokerage.models import APIKey
from brokerage.services.limits import set_key_limits
from tests.brokerage import factories

pytestmark = pytest.mark.django_db


def test_staff_change_the_limits_of_a_key_and_nothing_else(client):
    client.force_login(factories.make_staff())
    key, _ = factories.make_key(factories.make_customer())
    page = reverse("admin:brokerage_apikey_change", args=[key.pk])
    form = {
        "name": "other",
        "requests_per_minute": "60",
        "tokens_per_minute": "",
        "concurrent_answers": "4",
    }
    for _ in range(2):  # the second time changes nothing
        assert client.post(page, form).status_code == 302
    stored = APIKey.objects.get()
    assert (stored.requests_per_minute, stored.tokens_per_minute, stored.concurrent_answers) == (60, None, 4)
    assert stored.name == "test"
    assert factories.audit_actions().count("api_key.limits_changed") == 1


def test_zero_is_no_limit_that_can_be_set():
    key, _ = factories.make_key(factories.make_customer())
    with pytest.raises(ValidationError) as caught:
        set_key_limits(
            key=key, actor=None, requests_per_minute=None, tokens_per_minute=0, concurrent_answers=None
        )
    assert list(caught.value.message_dict) == ["tokens_per_minute"]
