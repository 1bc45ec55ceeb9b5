"""The back office's pages about evictions in a real Chromium, under the policy that blocks inline code."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.contrib.auth.models import User
from django.utils import timezone
from playwright.sync_api import Page, expect

from brokerage.models import EvictionNotice, Node, Reroute
from brokerage.services.audit import record
from tests.brokerage.factories import make_node
from tests.e2e.test_browser import (
    PASSWORD,
    browser,
    page,
    plain_static_files,
    pytestmark,
    quick_passwords,
    site,
    too_wide,
)

__all__ = ["browser", "page", "plain_static_files", "pytestmark", "quick_passwords", "site"]

EPOCH = 1_796_119_200_000
# From under a tenth of a millisecond to seconds, as a kernel flip, a relay flip and a slow node have them.
FLIPS_MS = (0.06, 0.14, 0.25, 0.31, 0.33, 0.4, 0.45, 0.6, 0.8, 1.4, 2.2, 7.5, 40, 260)


@pytest.fixture
def story(site: str) -> Node:
    """A node that leaves now and was evicted before, one that stays and one that was never heard of."""
    now = timezone.now()
    node = make_node(
        "spot-paris-1", state="draining", state_reason="aws: terminate", epoch=EPOCH, last_seen_at=now,
        provider="aws", zone="eu-west-3a", host="10.0.3.17", port=8081, slots=8,
    )  # fmt: skip
    make_node("standby-1", state="ready", epoch=EPOCH, last_seen_at=now, slots=8)
    make_node("spot-oregon-2")
    for number, flip_ms in reversed([*enumerate(FLIPS_MS)]):
        signal_at = now - timedelta(hours=3 * number, minutes=1)
        Reroute.objects.create(
            node=node,
            epoch=EPOCH - number,
            signal_at=signal_at,
            flipped_at=signal_at + timedelta(milliseconds=flip_ms),
            first_byte_at=signal_at + timedelta(milliseconds=flip_ms + 18 + 3 * number) if number else None,
            flows=number,
        )
        EvictionNotice.objects.create(
            node=node,
            epoch=EPOCH - number,
            source="aws",
            action="terminate",
            deadline=signal_at + timedelta(minutes=2 + 60 * (not number)),
            fingerprint=str(number),
            signal_at=signal_at,
        )
        if number:
            record("node.lost", subject=node, epoch=EPOCH - number)
    return node


@pytest.fixture
def office(page: Page) -> Page:
    User.objects.create_superuser("boss", "boss@example.com", PASSWORD)
    page.goto("/admin/login/")
    page.get_by_label("Username").fill("boss")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Back office")).to_be_visible()
    return page


def test_an_eviction_is_followed_from_the_list_to_its_timeline(office, story):
    office.goto("/admin/brokerage/node/")
    office.get_by_role("link", name="leaving").click()
    expect(office.locator("#result_list tbody tr")).to_have_count(1)
    office.get_by_role("link", name="spot-paris-1").click()
    expect(office.get_by_role("region", name="Open notices").first).to_contain_text("left")
    newest = office.locator(".steering-timeline").first
    expect(newest.get_by_role("listitem")).to_have_count(5)
    expect(newest).to_contain_text("Flip +0.060 ms")
    office.get_by_role("link", name="All reroutes of this node").click()
    expect(office.locator("#result_list tbody tr")).to_have_count(len(FLIPS_MS))


def test_the_histogram_is_drawn_and_told(office, story):
    office.goto("/admin/brokerage/reroute/")
    expect(office.locator("#steering-histogram canvas")).to_be_visible()
    office.get_by_text("The same as a table").click()
    expect(office.get_by_role("region", name="Reroutes by latency").get_by_role("row")).to_have_count(18)
    office.get_by_role("link", name="signal to flip").first.click()
    expect(office.locator("#result_list tbody tr").first).to_contain_text("0.060 ms")


def test_the_histogram_says_what_is_under_the_pointer(office, story):
    office.goto("/admin/brokerage/reroute/")
    over = office.locator("#steering-histogram .u-over")
    box = over.bounding_box()
    third_of_seventeen = box["width"] * (2 + 0.6) / (16 + 1.2)
    over.hover(position={"x": third_of_seventeen, "y": 20})
    expect(office.locator("#steering-histogram .u-legend")).to_contain_text("≤ 0.5 ms")


def test_the_histogram_follows_the_switch_between_light_and_dark(office, story):
    office.emulate_media(color_scheme="light")
    office.goto("/admin/brokerage/reroute/")
    light = office.locator("#steering-histogram canvas").evaluate("canvas => canvas.toDataURL()")
    office.locator(".theme-toggle:visible").click()
    expect(office.locator("html")).to_have_attribute("data-theme", "dark")
    office.wait_for_function(
        "light => document.querySelector('#steering-histogram canvas').toDataURL() !== light", arg=light
    )


@pytest.mark.parametrize("model", ["node", "evictionnotice", "reroute"])
def test_an_empty_list_explains_itself(office, model):
    office.goto(f"/admin/brokerage/{model}/")
    expect(office.get_by_text(re.compile(r"No (node|notice|reroute) yet\."))).to_be_visible()


# Django's own markup, where axe finds links told apart by colour alone.
STOCK = [[".breadcrumbs"], ["#toolbar"]]


def serious_of_ours(page: Page) -> list[str]:
    found = Axe().run(page, context={"exclude": STOCK}).response["violations"]
    return [
        f"{each['impact']} {each['id']}: {node['html'][:120]}"
        for each in found
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1300), ("dark", 390)])
def test_no_page_keeps_anybody_out(office, story, scheme, width):
    office.emulate_media(color_scheme=scheme)
    office.set_viewport_size({"width": width, "height": 900})
    notice, reroute = EvictionNotice.objects.first(), Reroute.objects.first()
    found = {}
    for address in (
        "node/", f"node/{story.pk}/change/", "evictionnotice/", f"evictionnotice/{notice.pk}/change/",
        "reroute/", f"reroute/{reroute.pk}/change/", "reroute/?q=nobody",
    ):  # fmt: skip
        office.goto(f"/admin/brokerage/{address}")
        found[address] = serious_of_ours(office) + too_wide(office, width)
    assert {address: problems for address, problems in found.items() if problems} == {}
