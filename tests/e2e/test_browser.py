"""The site as a person meets it: a real Chromium against a real server, database and cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from django.core.wsgi import get_wsgi_application
from django.db import connections
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.apex.conftest import Team, make_team, plain_static_files

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
__all__ = ["plain_static_files"]


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
    settings.CSRF_TRUSTED_ORIGINS = [url := f"http://127.0.0.1:{server.server_port}"]
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
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
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
