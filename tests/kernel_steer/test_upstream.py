"""Third parties' APIs by TLS: certificates, keys, addresses, and answers that are carried like any other."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kernel_steer.admission import Node, Outcome, Refusal, Resume, Upstream
from kernel_steer.resume.leg import LegFailed, LegRefused, Mode
from kernel_steer.upstream.address import AddressRefused, allowed
from kernel_steer.upstream.connection import Connections
from kernel_steer.upstream.legs import Upstreams
from tests.kernel_steer.harness import QUICK, AdmissionDouble, Bench, make_work
from tests.kernel_steer.https_double import KEY, WORDS, Authority, HttpsDouble

TEXT = "".join(WORDS)
# Nothing here is decided by a slow machine.
PATIENT = dataclasses.replace(
    QUICK, head_s=60, token_gap_s=60, gap_floor_s=60, done_gap_s=60, first_search_s=60
)
LOOPBACK = ("127.0.0.0/8",)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
async def api(authority: Authority, tmp_path: Path) -> AsyncIterator[HttpsDouble]:
    async with HttpsDouble(authority.context(tmp_path)).running() as double:
        yield double


@pytest.fixture
async def upstreams() -> AsyncIterator[Upstreams]:
    made = Upstreams()
    yield made
    made.close()


def node_at(
    port: int, ca_pem: str, *, name: str = "acme", host: str = "127.0.0.1", resume: Resume = Resume.NONE
) -> Node:
    upstream = Upstream("/openai/v1", "acme/big-8b", KEY, ca_pem, LOOPBACK)
    return Node(name, 1, host, port, resume=resume, upstream=upstream)


@dataclasses.dataclass
class Foreign(AdmissionDouble):
    """Its nodes are third parties."""

    nodes: list[Node] = dataclasses.field(default_factory=list)
    misconfigured: list[str] = dataclasses.field(default_factory=list)

    def choose_node(
        self, model: str, *, exclude: frozenset[str] = frozenset(), prefix: bytes = b""
    ) -> Node | None:
        bad = exclude | {name for name, _ in self.failed}
        node = next((node for node in self.nodes if node.name not in bad), None)
        self.legs_open += node is not None
        return node

    def node_misconfigured(self, name: str, epoch: int, reason: str) -> None:
        super().node_misconfigured(name, epoch, reason)
        self.misconfigured.append(reason)


@pytest.fixture
def business() -> Foreign:
    return Foreign([])


@pytest.fixture
def bench(business: Foreign, tmp_path: Path):
    made = Bench(business, tmp_path, limits=PATIENT)
    yield made
    made.services.upstreams.close()
    made.close()


async def ask(upstreams: Upstreams, node: Node):
    return await upstreams.open_leg(
        number=1,
        node=node,
        mode=Mode.FRESH,
        path="/v1/chat/completions",
        body={"model": "double", "stream": True},
        request_id="r",
        timeout_s=30,
        watch=None,
    )


async def failure(upstreams: Upstreams, node: Node) -> LegFailed:
    with pytest.raises(LegFailed) as caught:
        await ask(upstreams, node)
    assert KEY not in str(caught.value)
    return caught.value


# --- answers ---------------------------------------------------------------------------------------------


async def test_an_answer_comes_by_tls_under_our_name_for_the_model(api, authority, bench, business):
    business.nodes = [node_at(api.port, authority.pem)]
    told, answer = await bench.stream(make_work(include_usage=True))
    assert (told.text, told.finish_reasons, told.dones) == (TEXT, ["stop"], 1)
    assert (answer.outcome, answer.prompt_tokens, answer.completion_tokens) == (Outcome.COMPLETED, 7, 4)
    bodies = [event.body for event in told.events if event.body]
    assert {body["model"] for body in bodies} == {"double"}
    assert not any("provider" in body or "cost" in (body.get("usage") or {}) for body in bodies)
    (asked,) = api.asked
    assert asked.path == "/openai/v1/chat/completions"
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["host"] == f"127.0.0.1:{api.port}"
    assert asked.body["model"] == "acme/big-8b"
    assert "return_token_ids" not in asked.body


async def test_a_document_is_collected_from_it(api, authority, bench, business):
    business.nodes = [node_at(api.port, authority.pem)]
    document, answer = await bench.collect(make_work())
    assert (document["model"], document["choices"][0]["message"]["content"]) == ("double", TEXT)
    assert document["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    assert answer.outcome is Outcome.COMPLETED


async def test_a_connection_is_used_for_the_next_answer(api, authority, bench, business):
    business.nodes = [node_at(api.port, authority.pem)]
    for _ in range(3):
        assert (await bench.stream(make_work()))[0].text == TEXT
        # The end of the body is read after the client has its answer.
        async with asyncio.timeout(30):
            while bench.services.upstreams._pumps:
                await asyncio.sleep(0.005)
    assert (len(api.asked), api.connections) == (3, 1)


async def test_what_is_cut_in_the_middle_is_an_honest_error(api, authority, bench, business):
    business.nodes = [node_at(api.port, authority.pem)]
    api.cut_after = 2
    told, answer = await bench.stream(make_work())
    assert (told.text, told.dones, told.finish_reasons) == ("".join(WORDS[:2]), 0, [])
    assert [error["code"] for error in told.errors] == ["node_lost"]
    assert answer.outcome is Outcome.FAILED


async def test_what_is_cut_goes_on_elsewhere_where_that_was_declared(authority, bench, business, tmp_path):
    context = authority.context(tmp_path)
    first = HttpsDouble(context, cut_after=2)
    async with first.running(), HttpsDouble(context, words=WORDS[2:]).running() as second:
        business.nodes = [
            node_at(first.port, authority.pem, name="a", resume=Resume.TEXT),
            node_at(second.port, authority.pem, name="b", resume=Resume.TEXT),
        ]
        told, answer = await bench.stream(make_work())
        assert (told.text, answer.outcome) == (TEXT, Outcome.COMPLETED)
        assert second.asked[0].body["messages"][-1] == {"role": "assistant", "content": "".join(WORDS[:2])}


async def test_leaving_the_leg_hangs_up_on_the_api(api, authority, upstreams):
    api.silent_after = 1
    leg = await ask(upstreams, node_at(api.port, authority.pem))
    leg.sock.close()
    await asyncio.wait_for(api.hung_up.wait(), 30)


# --- what it says instead of an answer ---------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_key_that_is_not_taken_is_our_fault_and_not_the_customers(
    status, api, authority, bench, business, caplog
):
    business.nodes = [node_at(api.port, authority.pem)]
    bench.services.limits = QUICK
    api.status, api.error = status, {"message": f"Incorrect API key provided: {KEY}"}
    with caplog.at_level(logging.DEBUG), pytest.raises(Refusal) as caught:
        await bench.stream(make_work())
    assert (caught.value.status, caught.value.code) == (503, "no_node")
    assert str(status) in caplog.text
    assert KEY not in caplog.text + caught.value.message + repr(business.nodes)
    if status == 403:  # perhaps it is about this customer's request
        assert business.misconfigured == []
    else:
        assert len(api.asked) == len(business.misconfigured) == 1


async def test_a_limit_of_theirs_sends_the_request_elsewhere_and_is_heeded(
    authority, bench, business, tmp_path
):
    context = authority.context(tmp_path)
    full = HttpsDouble(context, status=429, headers={"Retry-After": "60"})
    async with full.running(), HttpsDouble(context).running() as other:
        business.nodes = [node_at(full.port, authority.pem, name="full"), node_at(other.port, authority.pem)]
        for _ in range(2):
            assert (await bench.stream(make_work()))[0].text == TEXT
        assert (len(full.asked), len(other.asked)) == (1, 2)
        assert business.failed == []


async def test_a_request_that_is_wrong_is_refused_in_our_words_for_the_model(api, authority, upstreams):
    api.status, api.error = 400, {"message": "acme/big-8b has no tools", "code": "bad", "param": "tools"}
    with pytest.raises(LegRefused) as caught:
        await ask(upstreams, node_at(api.port, authority.pem))
    refused = caught.value
    assert (refused.status, refused.message, refused.param) == (400, "double has no tools", "tools")


async def test_a_redirect_is_not_followed(api, authority, upstreams):
    api.status, api.headers = 307, {"Location": "https://elsewhere.example/"}
    assert (await failure(upstreams, node_at(api.port, authority.pem))).misconfigured


# --- who it is -----------------------------------------------------------------------------------------------


async def test_another_authority_is_not_trusted(api, upstreams):
    assert "certificate" in str(await failure(upstreams, node_at(api.port, Authority().pem)))
    assert "certificate" in str(
        await failure(upstreams, node_at(api.port, ""))
    )  # nor does the system know it
    assert api.asked == []


@pytest.mark.parametrize(
    ("made", "why"), [({"host": "other.example"}, "mismatch"), ({"expired": True}, "expired")]
)
async def test_a_certificate_for_another_host_or_time_is_not_accepted(
    made, why, authority, upstreams, tmp_path
):
    async with HttpsDouble(authority.context(tmp_path, **made)).running() as api:
        error = await failure(upstreams, node_at(api.port, authority.pem))
        assert why in str(error)
        assert error.unreachable
        assert api.asked == []


async def test_the_name_of_the_host_is_what_the_certificate_has_to_be_for(authority, tmp_path):
    async def here(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    upstreams = Upstreams(Connections(here))
    async with HttpsDouble(authority.context(tmp_path, host="api.example")).running() as api:
        leg = await ask(upstreams, node_at(api.port, authority.pem, host="api.example"))
        leg.sock.close()
        assert api.asked[0].headers["host"] == f"api.example:{api.port}"
    upstreams.close()


async def test_a_server_without_tls_is_not_given_the_key(authority, upstreams):
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(65536))
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert "TLS" in str(await failure(upstreams, node_at(port, authority.pem)))
    assert KEY.encode() not in heard


# --- where it is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "::1",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "fd00:ec2::254",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "2002:a00:1::",
        "0.0.0.0",
        "224.0.0.1",
    ],
)
def test_addresses_that_are_no_third_partys_are_refused(address):
    with pytest.raises(AddressRefused, match="is "):
        allowed([address])


def test_an_operator_may_allow_private_networks_but_no_metadata_service():
    everything = ("0.0.0.0/0", "::/0")
    assert allowed(["10.1.2.3", "8.8.8.8"], private_networks=("10.0.0.0/8",)) == ["10.1.2.3", "8.8.8.8"]
    for address in ("169.254.169.254", "fd00:ec2::254", "168.63.129.16", "64:ff9b::a9fe:a9fe"):
        with pytest.raises(AddressRefused, match="metadata"):
            allowed([address], private_networks=everything)


async def test_a_name_that_changes_its_address_gets_no_connection(api, authority):
    answers = [["8.8.8.8"], ["169.254.169.254"], ["10.0.0.1"]]
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers[len(asked)]

    upstreams = Upstreams(Connections(rebinding))
    for why in ("metadata service", "not a public address"):
        assert why in str(await failure(upstreams, node_at(api.port, authority.pem, host="api.example")))
    assert len(asked) == 2  # once for each connection: what was checked is what is connected to
