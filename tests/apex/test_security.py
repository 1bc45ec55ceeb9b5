"""Nobody sees or touches what is another's, and every page says what browsers and caches may do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from djmoney.money import Money

from brokerage.models import Budget, Project
from brokerage.services.projects import create_project
from ledger.models import Account, TopUp
from tests.apex.conftest import Team, make_usage

pytestmark = pytest.mark.django_db


def routes(patterns: list[URLPattern | URLResolver], prefix: str = "") -> Iterator[str]:
    for pattern in patterns:
        route = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from routes(pattern.url_patterns, route)
        else:
            yield route


ROUTES = [route for route in routes(get_resolver().url_patterns) if route.startswith(("v1/", "portal/"))]
PARAMETER = re.compile(r"<(?:uuid|int):(\w+)>")
# These name nothing of anybody's: the same address shows everybody their own.
COMMON = re.compile(r"<(?:str|statement_format):(\w+)>")
COMMON_VALUES = {"month": f"{datetime.now(UTC):%Y-%m}", "extension": "csv"}


def address_of(route: str, things: dict[str, str]) -> str:
    route = COMMON.sub(lambda match: COMMON_VALUES[match[1]], route)
    return "/" + PARAMETER.sub(lambda match: things[match[1]], route)


@pytest.fixture
def acme_things(acme: Team) -> dict[str, str]:
    """One of everything that Acme owns, by the name of the route's parameter."""
    make_usage(acme)
    top_up = TopUp.objects.create(
        account=Account.objects.get(code=acme.customer.wallet_code),
        amount=Money("25", "USD"),
        idempotency_key="acme-1",
        return_url="http://testserver/r",
        cancel_url="http://testserver/c",
        actor="test",
    )
    # A number that stands in no page by chance.
    budget = Budget.objects.create(pk=987654321, customer=acme.customer, period="month", amount=10)
    project = create_project(customer=acme.customer, name="Secret plans", actor=None)
    return {
        "key_id": str(acme.key.pk),
        "top_up_id": str(top_up.public_id),
        "budget_id": str(budget.pk),
        "project_id": str(project.pk),
    }


def test_the_walk_below_knows_every_parameter(acme_things):
    assert {name for route in ROUTES for name in PARAMETER.findall(route)} == set(acme_things)
    assert len(ROUTES) > 20


@pytest.mark.parametrize("route", ROUTES)
def test_another_customer_finds_nothing_of_acmes(route, acme, acme_things, other):
    address = address_of(route, acme_things)
    for client in (other.portal(), other.api()):
        for method in ("get", "post", "patch", "delete"):
            answer = getattr(client, method)(address)
            if PARAMETER.search(route):
                # Not there, or not for this kind of request or caller; never "forbidden", which confirms it.
                assert answer.status_code in {302, 404, 405}, (method, answer.status_code)
            for mine in chain([acme.customer.pk, acme.user.username, acme.key.last4], acme_things.values()):
                assert str(mine) not in answer.text.replace(address, ""), (method, mine)
    acme.key.refresh_from_db()
    assert acme.key.revoked_at is None
    assert Project.objects.get(pk=acme_things["project_id"]).archived_at is None
    assert Budget.objects.filter(customer=acme.customer).exists()


def test_switching_to_another_customers_team_is_not_possible(acme, other):
    portal = other.portal()
    assert portal.post("/portal/switch/", {"customer": acme.customer.pk}).status_code == 404
    assert portal.post("/portal/switch/", {"customer": "nonsense"}).status_code == 404
    assert "Acme" not in portal.get("/portal/").text


@pytest.mark.parametrize("route", [route for route in ROUTES if route.startswith("portal/")])
def test_the_portal_asks_everybody_to_sign_in(route, acme_things, client):
    address = address_of(route, acme_things)
    method = client.post if {"switch", "remove"} & set(route.split("/")) else client.get
    answer = method(address)
    assert (answer.status_code, answer.url) == (302, f"/sign-in/?next={address}")


@pytest.mark.parametrize("path", ["/", "/sign-in/", "/nowhere", "/portal/", "/admin/login/", "/v1/usage"])
def test_headers_of_every_page(path, acme):
    headers = acme.portal().get(path, follow=True).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["X-Request-ID"]


def test_styles_are_relaxed_for_the_api_documentation_alone(client):
    policy = client.get("/v1/docs").headers["Content-Security-Policy"]
    assert "style-src 'self' 'unsafe-inline'" in policy
    assert policy.count("unsafe") == 1


def test_only_the_purchase_form_may_lead_to_paypal(acme, settings):
    portal = acme.portal()
    assert settings.PAYPAL_STUB_URL in portal.get("/portal/credits/").headers["Content-Security-Policy"]
    assert settings.PAYPAL_STUB_URL not in portal.get("/portal/").headers["Content-Security-Policy"]


@pytest.mark.parametrize("path", ["/portal/", "/portal/keys/", "/portal/nowhere", "/", "/v1/usage"])
def test_nothing_of_a_signed_in_person_is_kept_by_a_cache(path, acme):
    assert acme.portal().get(path).headers["Cache-Control"] == "private, no-store"


def test_nothing_of_a_key_is_kept_by_a_cache(acme):
    assert acme.api().get("/v1/models").headers["Cache-Control"] == "private, no-store"


@pytest.mark.parametrize("path", ["/", "/sign-in/", "/portal/keys/", "/portal/switch/", "/portal/credits/"])
def test_every_form_needs_its_token(path, acme):
    browser = Client(enforce_csrf_checks=True)
    if path.startswith("/portal/"):
        browser.force_login(acme.user)
    answer = browser.post(path, {"name": "x"})
    assert answer.status_code == 403
    assert "This form is too old" in answer.text


def test_metrics_are_for_this_machine_staff_and_scrapers(acme, admin_client, settings):
    afar = {"REMOTE_ADDR": "203.0.113.9"}
    assert Client().get("/metrics").status_code == 200
    assert Client().get("/metrics", **afar).status_code == 403
    assert Client().get("/metrics", headers={"x-forwarded-for": "203.0.113.9"}).status_code == 403
    assert acme.portal().get("/metrics", **afar).status_code == 403
    assert admin_client.get("/metrics", **afar).status_code == 200
    settings.METRICS_TOKEN = "scrape-me"
    assert Client(headers={"authorization": "Bearer scrape-me"}).get("/metrics", **afar).status_code == 200
    assert Client(headers={"authorization": "Bearer "}).get("/metrics", **afar).status_code == 403


def test_metrics_name_routes_and_never_addresses(client):
    client.get("/some/scanner/address")
    client.get("/")
    text = client.get("/metrics").text
    assert 'apex_http_requests_total{method="GET",status="200",view="landing"}' in text
    assert "scanner" not in text
    assert 'apex_nodes{state="ready"} 0.0' in text


def test_deployment_check_is_clean_over_https():
    environment = os.environ | {"APEX_PUBLIC_URL": "https://apex.example", "ALLOWED_HOSTS": "apex.example"}
    environment["SECRET_KEY"] = "aB3-dE5_fG7hI9jK1lM3nO5pQ7rS9tU1vW3xY5zA7bC9dE1fG3hI5"
    checked = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr


def test_a_client_cannot_choose_its_address(rf, settings):
    from apex.api.rate_limit import client_ip

    request = rf.get("/", headers={"x-forwarded-for": "1.1.1.1, 2.2.2.2"}, REMOTE_ADDR="10.0.0.1")
    assert client_ip(request) == "10.0.0.1"
    settings.TRUSTED_PROXIES = 1
    assert client_ip(request) == "2.2.2.2"
