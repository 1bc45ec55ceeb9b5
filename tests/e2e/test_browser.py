"""The site as a person meets it: a real Chromium against a real server, database and cache."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from axe_playwright_python.sync_playwright import Axe
from celery import current_app
from django.contrib.auth.models import User
from django.core.wsgi import get_wsgi_application
from django.db import connections
from django.test import Client
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from brokerage.models import APIKey, PilotApplication
from ledger.models import Account
from ledger.services import Line, platform_account, post_journal
from tests.apex.conftest import Team, make_team, make_usage, plain_static_files, quick_passwords

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PASSWORD = "correct horse 7"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no Chromium at {CHROMIUM} (apt-get install chromium)"),
]
__all__ = ["plain_static_files", "quick_passwords"]


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Playwright's own loop makes Django believe that this thread is asynchronous.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def site(fresh_database: str, redis_client, settings) -> Iterator[str]:
    """The site on a port of its own, static files from their sources."""
    settings.WHITENOISE_USE_FINDERS = settings.WHITENOISE_AUTOREFRESH = True
    application = get_wsgi_application()

    def serve(environ, start_response):
        try:
            yield from application(environ, start_response)
        finally:
            connections.close_all()

    server = make_server("127.0.0.1", 0, serve, handler_class=_Quiet)
    settings.PUBLIC_URL = url = f"http://127.0.0.1:{server.server_port}"
    settings.CSRF_TRUSTED_ORIGINS = [url]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield url
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def team(site: str) -> Team:
    return make_team("Acme")


@pytest.fixture
def page(browser: Browser, site: str) -> Iterator[Page]:
    """A fresh visitor. Whatever the content security policy blocks or a script complains of fails the test."""
    context = browser.new_context(base_url=site)
    page = context.new_page()
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # Chromium also reports every form that came back with errors beside its fields; and what
        # other sites (the loopback PayPal) do is theirs.
        ours = message.location["url"].startswith(site)
        if message.type == "error" and ours and "status of 422" not in message.text:
            complaints.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert complaints == []


def sign_in(page: Page, team: Team) -> None:
    page.goto("/sign-in/")
    page.get_by_label("E-mail or user name").fill(team.user.username)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Acme")


def give_credit(team: Team, amount: str) -> None:
    wallet = Account.objects.get(code=team.customer.wallet_code)
    source = platform_account(code="promo_deferred", currency="USD")
    lines = [Line(wallet.pk, Decimal(amount)), Line(source.pk, -Decimal(amount))]
    post_journal(scope="test", key="credit", kind="top_up", currency="USD", lines=lines, actor="test")


def serious(page: Page) -> list[str]:
    """What axe finds that keeps somebody out, as readable lines."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['impact']} {each['id']}: {each['nodes'][0]['html'][:120]}"
        for each in found
        if each["impact"] in {"serious", "critical"}
    ]


def test_a_customer_signs_in_and_sees_the_balance(page, team):
    give_credit(team, "12.34")
    sign_in(page, team)
    expect(page.locator("#balance-available")).to_have_text("12.34 USD")
    expect(page.locator("#balance-held")).to_have_text("0.00 USD")


@pytest.fixture
def paypal(settings) -> Iterator[str]:
    """The loopback PayPal in a process of its own; tasks run at once, where they are sent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "ledger.paypal.stub", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    wait_for_port(port)
    settings.PAYPAL_STUB_URL = f"http://127.0.0.1:{port}"
    current_app.conf.task_always_eager = True
    yield settings.PAYPAL_STUB_URL
    current_app.conf.task_always_eager = False
    process.terminate()
    process.wait(timeout=10)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("the loopback PayPal did not start")


def test_credits_are_bought_at_paypal_and_arrive(page, paypal, team):
    sign_in(page, team)
    page.get_by_role("link", name="Buy credits").first.click()
    page.get_by_label("Amount in USD").fill("25")
    page.get_by_role("button", name="Continue to PayPal").click()
    page.get_by_role("button", name="Approve").click()
    expect(page.get_by_text("You have 25.00 USD available.")).to_be_visible()
    page.get_by_role("link", name="Statement").click()
    expect(page.get_by_role("region", name="Entries")).to_contain_text("Credits bought")


def test_a_cancelled_payment_charges_nothing(page, paypal, team):
    sign_in(page, team)
    page.goto("/portal/credits/")
    page.get_by_label("Amount in USD").fill("25")
    page.get_by_role("button", name="Continue to PayPal").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Payment cancelled")
    page.goto("/portal/")
    expect(page.locator("#balance-posted")).to_have_text("0.00 USD")


def test_usage_is_drawn_and_told(page, team):
    for minutes in (5, 3000, 9000):
        make_usage(team, minutes_ago=minutes)
    sign_in(page, team)
    expect(page.locator("#usage-plot canvas")).to_be_visible()
    page.get_by_text("The same as a table").click()
    expect(page.get_by_role("region", name="Usage by day").get_by_role("row")).to_have_count(4)


def test_everything_works_by_keyboard(page, team):
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.goto("/sign-in/")
    page.get_by_label("E-mail or user name").focus()
    page.keyboard.type(team.user.username)
    page.keyboard.press("Tab")
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Acme")
    tab_to(page, "API keys")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("API keys")
    page.get_by_label("Name").focus()
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Your new API key")).to_have_value(re.compile(r"^apx_live_\w{38}$"))


def tab_to(page: Page, name: str) -> None:
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == name:
            return
    pytest.fail(f"{name} cannot be reached with the tab key")


def test_a_key_is_made_copied_and_revoked(page, team):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    sign_in(page, team)
    page.goto("/portal/keys/")
    page.get_by_label("Name").fill("staging")
    page.get_by_role("button", name="Make the key").click()
    secret = page.get_by_label("Your new API key").input_value()
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == secret
    api = Client(headers={"authorization": f"Bearer {secret}"})
    assert api.get("/v1/balance").status_code == 200

    page.get_by_role("link", name="Revoke staging").click()
    page.get_by_role("button", name="Revoke the key").click()
    expect(page.get_by_text("“staging” is revoked")).to_be_visible()
    assert secret not in page.content()
    assert api.get("/v1/balance").status_code == 401


def test_somebody_applies_for_the_pilot(page):
    page.goto("/")
    page.get_by_label("Your name").fill("Ada")
    page.get_by_label("E-mail").fill("ada@")
    page.get_by_label("Company or team").fill("Engines")
    page.get_by_label("What will you run?").fill("Proofs")
    page.get_by_role("button", name="Send application").click()
    expect(page.get_by_text("Enter a valid email address.")).to_be_visible()
    page.get_by_label("E-mail").fill("ada@example.com")
    page.get_by_role("button", name="Send application").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Thank you")
    assert PilotApplication.objects.get().email == "ada@example.com"


def test_the_landing_page_shows_how_the_platform_is(page):
    page.goto("/")
    expect(page.locator(".strip .badge")).to_have_text(re.compile("pass|warn|fail"))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_no_page_keeps_anybody_out(page, team, scheme, width):
    """axe on every page, and nothing that only a wide screen can show."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    make_usage(team)
    found = {}
    for address in PUBLIC:
        page.goto(address)
        found[address] = serious(page) + too_wide(page, width)
    sign_in(page, team)
    for address in PORTAL:
        page.goto(address)
        found[address] = serious(page) + too_wide(page, width)
    assert {address: problems for address, problems in found.items() if problems} == {}


PUBLIC = ["/", "/sign-in/", "/password/forgot/", "/apply/thanks/", "/status/"]
PORTAL = [
    "/portal/", "/portal/usage/", "/portal/keys/", "/portal/projects/", "/portal/budgets/", "/portal/credits/", "/portal/credits/cancel/",
    "/portal/statement/", "/portal/credits/low/", "/password/change/",
]  # fmt: skip


def too_wide(page: Page, width: int) -> list[str]:
    needed = page.evaluate("document.documentElement.scrollWidth")
    return [f"needs {needed} px"] if needed > width else []


def test_the_api_documentation_is_drawn(page):
    page.goto("/v1/docs")
    expect(page.locator("#swagger-ui .opblock").first).to_be_visible()


def test_the_back_office_works_under_the_same_policy(page, site):
    User.objects.create_superuser("boss", "boss@example.com", PASSWORD)
    page.goto("/admin/login/")
    page.get_by_label("Username").fill("boss")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Back office")).to_be_visible()
    page.get_by_role("link", name="Customers", exact=True).first.click()
    expect(page.locator("#changelist")).to_be_visible()


def test_a_project_is_made_given_a_key_and_a_budget_and_archived_by_keyboard_alone(page, team):
    make_usage(team)
    sign_in(page, team)
    page.goto("/portal/projects/")
    page.get_by_label("Name").fill("Support bot")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Support bot")
    page.get_by_role("button", name="Make a key").press("Enter")
    expect(page.get_by_label("Project")).to_have_value(re.compile("-"))
    expect(page.locator("#id_project option:checked")).to_have_text("Support bot")
    page.get_by_label("Name").fill("web shop")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="“web shop” is ready. Copy it now")).to_be_visible()
    page.get_by_role("link", name="Support bot").press("Enter")
    page.get_by_role("link", name="Set a budget").press("Enter")
    expect(page.locator("#id_scope option:checked")).to_have_text("Support bot")
    page.get_by_label("Amount in USD").fill("20")
    page.keyboard.press("Enter")
    expect(page.get_by_role("row", name=re.compile("Project Support bot"))).to_be_visible()
    key = APIKey.objects.get(name="web shop")
    make_usage(team, api_key=key)
    page.get_by_role("link", name="Support bot").press("Enter")
    expect(page.get_by_role("region", name="Keys of this project")).to_contain_text("web shop")
    assert serious(page) == []
    page.get_by_role("link", name="Archive this project").press("Enter")
    assert serious(page) == []
    page.get_by_role("button", name="Archive the project").press("Enter")
    expect(page.get_by_text("is archived, and 1 key is revoked")).to_be_visible()
    key.refresh_from_db()
    assert key.revoked_at is not None
