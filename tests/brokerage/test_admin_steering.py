"""The back office shows an eviction: what was announced, how fast traffic moved, what became of the node."""

import html
import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from brokerage.admin.wording import ago, countdown, milliseconds, offset, span
from brokerage.models import EvictionNotice, Node, Reroute
from brokerage.selectors import last_evictions, open_notices, reroute_latencies, with_latencies
from brokerage.services.audit import record
from brokerage.services.evictions import book_eviction
from kernel_steer.signals import GatewayAddress, GatewayReport, register
from tests.brokerage import factories

pytestmark = pytest.mark.django_db

EPOCH = 1_764_583_200_000  # 2025-12-01 10:00:00
SIGNAL_AT = datetime(2026, 12, 1, 10, 0, 0, tzinfo=UTC)


@pytest.fixture
def office(client):
    client.force_login(factories.make_staff())
    return client


def url(model: str, page: str = "changelist", *args) -> str:
    return reverse(f"admin:brokerage_{model}_{page}", args=args)


def text(response) -> str:
    """What a person reads, with each run of blanks as one."""
    assert response.status_code == 200
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", response.content.decode())).split())


def listed(response) -> list[str]:
    """The first column of the list."""
    assert response.status_code == 200
    body = response.content.decode()
    return re.findall(r'<th class="field-\w+(?: nowrap)?"><a [^>]*>([^<]*)</a>', body)


def ms(value: float) -> timedelta:
    return timedelta(milliseconds=value)


def make_reroute(node: Node, flip_ms: float | None, first_byte_ms: float | None = None, **fields) -> Reroute:
    signal_at = fields.pop("signal_at", SIGNAL_AT)
    return Reroute.objects.create(
        node=node,
        signal_at=signal_at,
        flipped_at=None if flip_ms is None else signal_at + ms(flip_ms),
        first_byte_at=None if first_byte_ms is None else signal_at + ms(first_byte_ms),
        **({"epoch": EPOCH} | fields),
    )


def make_notice(node: Node, **fields) -> EvictionNotice:
    number = EvictionNotice.objects.count()
    defaults = {
        "epoch": EPOCH, "source": "aws", "action": "terminate", "signal_at": SIGNAL_AT,
        "fingerprint": f"notice {number}",
    }  # fmt: skip
    return EvictionNotice.objects.create(node=node, **(defaults | fields))


# --- words ---


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (125, "2 min 5 s"), (3603, "1 h"), (90_061, "1 d 1 h"), (-90, "1 min 30 s")],
)
def test_spans(seconds, words):
    assert span(timedelta(seconds=seconds)) == words


def test_countdowns_and_ages():
    now = SIGNAL_AT
    assert countdown(now + timedelta(seconds=95), now) == "1 min 35 s left"
    assert countdown(now - timedelta(hours=2), now) == "passed 2 h ago"
    assert ago(now - timedelta(seconds=3), now) == "3 s ago"
    assert ago(now + timedelta(seconds=3), now) == "in 3 s"


def test_latencies_have_the_digits_that_matter():
    assert [milliseconds(value) for value in (0.2512, 12.34, 1234.56)] == [
        "0.251 ms",
        "12.3 ms",
        "1,234.6 ms",
    ]
    assert offset(ms(0.25)) == "+0.250 ms"
    assert offset(ms(-1.5)) == "-1.500 ms"
    assert offset(timedelta(seconds=31)) == "+31 s"


# --- the distribution ---


def test_percentiles_are_measured_values_and_buckets_hold_their_upper_bound():
    node = factories.make_node("node-a")
    for number in range(100):
        make_reroute(node, flip_ms=0.1 * (number + 1), epoch=number)
    make_reroute(node, flip_ms=None, epoch=100)
    make_reroute(node, flip_ms=60_000, first_byte_ms=61_000, epoch=101)
    found = reroute_latencies(with_latencies(Reroute.objects.all()))
    assert found.total == 102
    flip = found.flip
    assert (flip.count, flip.p50_ms, flip.p99_ms, flip.max_ms) == pytest.approx((101, 5.1, 10.0, 60_000))
    assert flip.sum_ms == pytest.approx(505 + 60_000)
    assert flip.cumulative[:7] == (1, 2, 5, 10, 20, 50, 100)
    assert flip.buckets[:7] == [1, 1, 3, 5, 10, 30, 50]
    assert (sum(flip.buckets), flip.buckets[-1]) == (101, 1)
    assert (found.first_byte.count, found.first_byte.buckets[-1]) == (1, 1)


def test_no_reroute_is_a_distribution_of_nothing():
    found = reroute_latencies()
    assert (found.total, found.flip.count, found.flip.sum_ms, found.flip.p50_ms) == (0, 0, 0.0, None)


# --- reroutes ---


def test_reroutes_are_told_in_milliseconds_and_sorted_by_them(office):
    for name, flip_ms, first_byte_ms in (("slow", 12.5, 40.25), ("quick", 0.25, 3), ("waiting", None, None)):
        make_reroute(factories.make_node(name), flip_ms, first_byte_ms)
    page = text(office.get(url("reroute")))
    assert "0.250 ms" in page
    assert "40.2 ms" in page
    assert "not yet" in page
    flip, first_byte = 2, 3  # columns, from 0
    assert listed(office.get(url("reroute"), {"o": flip})) == ["quick", "slow", "waiting"]
    assert listed(office.get(url("reroute"), {"o": f"-{first_byte}"})) == ["waiting", "slow", "quick"]


def test_figures_and_histogram_follow_the_filters(office):
    make_reroute(factories.make_node("node-a", provider="aws"), 0.25, 3)
    make_reroute(factories.make_node("node-b", provider="gcp"), 900, 950)
    everything = office.get(url("reroute"))
    assert "Flip 0.250 ms 900.0 ms 900.0 ms 2" in text(everything)
    assert sum(histogram(everything)["flip"]) == 2
    one = office.get(url("reroute"), {"node__provider__exact": "aws"})
    assert "Flip 0.250 ms 0.250 ms 0.250 ms 1" in text(one)
    assert sum(histogram(one)["flip"]) == sum(histogram(one)["first_byte"]) == 1
    assert "≤" not in text(one)  # only the script writes it


def histogram(response) -> dict:
    [data] = re.findall(
        r'<script id="steering-histogram-data" type="application/json">(.*?)</script>',
        response.content.decode(),
    )
    return json.loads(data)


def test_the_histogram_is_also_a_table(office):
    make_reroute(factories.make_node("node-a"), 0.25)
    page = text(office.get(url("reroute")))
    assert "0.1 ms 0 0 0.2 ms 0 0 0.5 ms 1 0 1 ms 0 0" in page


def test_a_day_can_be_chosen(office):
    node = factories.make_node("node-a")
    make_reroute(node, 1, epoch=1)
    make_reroute(node, 700, epoch=2, signal_at=SIGNAL_AT - timedelta(days=1))
    page = office.get(url("reroute"), {"signal_at__year": 2026, "signal_at__month": 12, "signal_at__day": 1})
    assert "Flip 1.000 ms 1.000 ms 1.000 ms 1" in text(page)


# --- notices ---


def test_a_notice_counts_down(office):
    now = timezone.now()
    node = factories.make_node("node-a", state="draining", epoch=EPOCH)
    make_notice(node, deadline=now + timedelta(minutes=5, seconds=30))
    make_notice(node, deadline=now - timedelta(hours=3, seconds=30), epoch=EPOCH - 1)
    make_notice(node, action="rebalance", source="gcp")
    page = text(office.get(url("evictionnotice")))
    assert re.search(r"5 min \d+ s left", page)
    assert "passed 3 h ago" in page
    assert "none named" in page


def test_a_notice_that_was_taken_back_is_not_open(office):
    factories.make_node("node-a", state="ready", epoch=EPOCH)
    notice = {"node": "node-a", "epoch": EPOCH, "source": "aws", "deadline": None}
    book_eviction(action="stop", signal_at=SIGNAL_AT, **notice)
    assert [found.action for found in open_notices()] == ["stop"]
    assert listed(office.get(url("evictionnotice"), {"status": "open"})) == ["node-a"]
    book_eviction(action="cancel", signal_at=SIGNAL_AT + timedelta(seconds=9), **notice)
    assert not open_notices().exists()
    assert "taken back" in text(office.get(url("evictionnotice"), {"status": "closed"}))
    book_eviction(action="stop", signal_at=SIGNAL_AT + timedelta(seconds=20), **notice)
    assert [found.action for found in open_notices()] == ["stop"]


def test_a_notice_closes_with_its_incarnation():
    node = factories.make_node("node-a", state="draining", epoch=EPOCH)
    make_notice(node)
    assert open_notices().count() == 1
    Node.objects.update(state="gone")
    assert open_notices().count() == 0
    Node.objects.update(state="ready", epoch=EPOCH + 1)
    assert open_notices().count() == 0


# --- nodes ---


def test_nodes_are_filtered_by_heartbeat_and_notice(office):
    now = timezone.now()
    fresh = factories.make_node("fresh", state="ready", epoch=EPOCH, last_seen_at=now)
    factories.make_node("silent", state="ready", epoch=EPOCH, last_seen_at=now - timedelta(minutes=2))
    factories.make_node("never")
    make_notice(fresh)
    for heard, name in (("now", "fresh"), ("silent", "silent"), ("never", "never")):
        assert listed(office.get(url("node"), {"heard": heard})) == [name]
    assert listed(office.get(url("node"), {"notice": "open"})) == ["fresh"]
    assert listed(office.get(url("node"), {"notice": "none"})) == ["never", "silent"]
    page = text(office.get(url("node")))
    assert re.search(r"\D2 min( \d+ s)? ago", page)
    assert "in the last 15 s (1)" in page


def test_the_page_of_a_node_tells_its_eviction(office):
    node = factories.make_node("node-a", state="draining", epoch=EPOCH, last_seen_at=timezone.now())
    deadline = timezone.now() + timedelta(minutes=2)
    book_eviction(
        node="node-a", epoch=EPOCH, action="terminate", source="aws", signal_at=SIGNAL_AT, deadline=deadline
    )
    before = text(office.get(url("node", "change", node.pk)))
    assert "Notice aws: terminate booked" in before
    assert "Signal 10:00:00.000" in before
    assert "Flip not yet First byte not yet of the next answer Gone not yet" in before
    assert re.search(r"terminate aws \S+ \S+ 1 min \d+ s left", before)
    assert f"{EPOCH} (started 2025-12-01 10:00:00)" in before

    Reroute.objects.update(flipped_at=SIGNAL_AT + ms(0.25), first_byte_at=SIGNAL_AT + ms(31.5), flows=3)
    record("node.lost", subject=node, epoch=EPOCH)
    after = text(office.get(url("node", "change", node.pk)))
    assert "Flip +0.250 ms 3 open answers moved First byte +31.5 ms" in after


def test_gone_is_the_first_loss_after_the_signal():
    node = factories.make_node("node-a", state="ready", epoch=EPOCH)
    record("node.lost", subject=node, epoch=EPOCH)  # a hiccup before the eviction
    make_reroute(node, 1, signal_at=timezone.now() + timedelta(seconds=5))
    [eviction] = last_evictions(node)
    assert eviction.gone_at is None
    Reroute.objects.update(signal_at=timezone.now() - timedelta(hours=1), flipped_at=None)
    make_reroute(node, 1, epoch=EPOCH + 1, signal_at=timezone.now() - timedelta(hours=1))
    record("node.reported", subject=node, epoch=EPOCH + 1, state="ready")
    newer, older = last_evictions(node)
    assert older.gone_at is not None
    assert newer.gone_at is None  # ready again, and what its predecessor lost is not its loss
    record("node.reported", subject=node, epoch=EPOCH + 1, state="gone")
    assert last_evictions(node)[0].gone_at is not None


def test_a_newer_incarnation_is_told_where_nobody_saw_the_old_one_go(office):
    node = factories.make_node("node-a", state="ready", epoch=EPOCH + 1)
    make_reroute(node, 1)
    assert "Gone started anew" in text(office.get(url("node", "change", node.pk)))


# --- all of them ---


@pytest.mark.parametrize("page", ["node", "evictionnotice", "reroute"])
def test_an_empty_list_says_what_would_be_in_it(office, page):
    name = {"node": "No node yet.", "evictionnotice": "No notice yet.", "reroute": "No reroute yet."}[page]
    assert name in text(office.get(url(page)))
    searched = text(office.get(url(page), {"q": "zebra"}))
    assert "Nothing matches the search and the filters." in searched
    assert name not in searched


def test_a_node_without_a_story_says_what_would_be_told(office):
    page = text(office.get(url("node", "change", factories.make_node("node-a").pk)))
    assert "Never evicted." in page
    assert "Nobody says that this node goes away." in page
    assert "not heard of yet" in page


def test_nobody_edits_any_of_it(office):
    node = factories.make_node("node-a")
    for model, row in (
        ("node", node),
        ("evictionnotice", make_notice(node)),
        ("reroute", make_reroute(node, 1)),
    ):
        assert office.post(url(model, "change", row.pk), {"flows": "7"}).status_code == 403
        assert office.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 403


def queries(office, address: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        text(office.get(address))
    return len(captured)


def test_the_page_of_a_node_costs_the_same_however_often_it_was_evicted(office):
    node = factories.make_node("node-a", state="draining", epoch=EPOCH)
    page = url("node", "change", node.pk)

    def evict(epochs: range) -> None:
        for epoch in epochs:
            make_notice(node, epoch=epoch)
            make_reroute(node, 1, 2, epoch=epoch)
            record("node.lost", subject=node, epoch=epoch)

    evict(range(EPOCH, EPOCH + 1))
    queries(office, page)  # content types and the like are cached by now
    few = queries(office, page)
    evict(range(EPOCH + 1, EPOCH + 9))
    assert queries(office, page) == few
    assert text(office.get(page)).count("First byte +2.000 ms") == 5


@pytest.mark.parametrize("page", ["node", "evictionnotice", "reroute"])
def test_a_list_costs_a_fixed_number_of_queries_with_every_filter_drawn(office, page):
    def fill(numbers: range) -> None:
        for number in numbers:
            node = factories.make_node(f"node-{number}", provider=f"provider-{number}", epoch=EPOCH)
            make_notice(node, source=f"source-{number}")
            make_reroute(node, number + 0.5, number + 1)

    fill(range(3))
    queries(office, url(page))
    few = queries(office, url(page))
    fill(range(3, 12))
    assert queries(office, url(page)) == few


# --- signals, by gateway --------------------------------------------------------------------------------------


def test_the_signals_of_every_gateway_are_on_the_page_of_reroutes(
    office, valkey_server, redis_client, settings
):
    settings.REDIS_URL = valkey_server.url
    page = url("reroute")
    assert "No gateway is running." in text(office.get(page))
    report = GatewayReport(
        engine="kernel", heard={"datagram": 3, "stream": 4}, first={"datagram": 3, "stream": 1}, duplicates=3, flips=4,
        flips_found=2, restores=1, refused=[("forged", "datagram", 7)],
    )  # fmt: skip
    register(redis_client, GatewayAddress("gateway-1", "127.0.0.1", 1), report)
    shown = text(office.get(page))
    assert "gateway-1 kernel 3 of 3 1 of 4 4 2 1 7" in shown


def test_the_page_of_reroutes_does_without_redis(office, settings, tmp_path):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody"
    assert "Not known now" in text(office.get(url("reroute")))
