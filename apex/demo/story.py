"""The story, scene by scene. Everything in it is real: processes, model, kill -9, money.

1 buy credits  2 eight answers from node A  3 the provider's notice  4 kill -9  5 the answers go on
6 the same questions again, undisturbed, to compare  7 the bill  8 the books
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asgiref.sync import sync_to_async
from djmoney.money import Money

from apex.demo.books import summarise
from apex.demo.clients import TOPICS, Customer, Stream
from apex.demo.purchase import buy_credits
from apex.demo.report import Report
from apex.demo.screen import Screen
from apex.local.paths import BASE_DIR
from apex.local.stack import Stack
from brokerage.models import Node, Reroute, UsageEvent
from kernel_steer.node.models import ensure_demo_model
from kernel_steer.node.tokenizer_export import ensure_tokenizer
from kernel_steer.resume.tokens import Detokenizer
from ledger.money import format_money

STREAMS = 8
TOKENS = 96  # per answer: long enough that the node dies in the middle
TOKENS_BEFORE_NOTICE = 8
SHORT_TOKENS = 8
NOTICE_S = 120.0  # as AWS gives; but this provider strikes after some seconds, as providers do
TOKENS_BEFORE_KILL = 32
VICTIM, STANDBY = "node-a", "node-b"
AMOUNT = "25.00"
MODEL = "gemma-3-270m"
_PATIENCE_S = 120.0


class StoryFailed(RuntimeError):
    """The story cannot go on; the message says at which point and why."""


@dataclass(slots=True)
class Story:
    stack: Stack
    screen: Screen
    credentials: dict[str, Any]

    def tell(self) -> Report:
        return asyncio.run(self._tell())

    async def _tell(self) -> Report:
        report = Report(urls=self.stack.urls())
        health = await _get_json(f"{self.stack.gateway_url}/healthz")
        report.engine, report.engine_detail = health["engine"], health["engine_detail"]
        customer = Customer(
            base_url=f"{self.stack.gateway_url}/v1",
            api_key=self.credentials["pilot"]["api_key"],
            model=MODEL,
            tokens=TOKENS,
        )
        try:
            await self._buy()
            first = await self._first_answers(customer)
            streams, newcomer = await self._answers_through_an_eviction(customer, report)
            again = await self._the_same_undisturbed(customer, streams)
        finally:
            await customer.close()
        await self._compare(streams, again, report)
        await self._bill([*first, *streams, newcomer, *again], report)
        await self._books(report)
        return report

    # --- scenes -------------------------------------------------------------------------------------

    async def _buy(self) -> None:
        self.screen.scene(f"Acme Robotics buys {AMOUNT} USD of credits with PayPal")
        balance = await asyncio.to_thread(
            buy_credits, web=self.stack.web_url, api_key=self.credentials["pilot"]["api_key"], amount=AMOUNT
        )
        self.screen.say(f"credited; available now {balance}")

    async def _first_answers(self, customer: Customer) -> list[Stream]:
        """Short questions until both nodes are known and the cheaper one, the victim, is the one that answers."""
        asked: list[Stream] = []

        async def known() -> bool:
            if await Node.objects.filter(state=Node.State.READY).acount() < len(self.stack.nodes):
                return False
            asked.append(Stream(len(asked), "Hello!"))
            await customer.stream(asked[-1], tokens=SHORT_TOKENS)
            return asked[-1].node == VICTIM

        await _until(known, f"{VICTIM} does not answer")
        return asked

    async def _answers_through_an_eviction(
        self, customer: Customer, report: Report
    ) -> tuple[list[Stream], Stream]:
        """The answers that lose their node, and the one of a customer who comes right after the notice."""
        self.screen.scene(f"{STREAMS} customers stream answers from {VICTIM}")
        streams = [Stream(number, TOPICS[number % len(TOPICS)]) for number in range(STREAMS)]
        answering = asyncio.create_task(customer.stream_all(streams))
        watching = asyncio.create_task(self.screen.watch(streams, TOKENS))
        try:
            await self._all_have(streams, TOKENS_BEFORE_NOTICE)
            newcomer = await self._notice(customer)
            await self._all_have(streams, TOKENS_BEFORE_KILL)
            self.screen.scene(f"{VICTIM} is killed with -9, engine and all, in mid-answer")
            await asyncio.to_thread(self.stack.process(VICTIM).kill_group)
            report.evictions = 1
            await answering
        finally:
            answering.cancel()
            watching.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
        report.streams = len(streams)
        everybody = [*streams, newcomer]
        report.client_resets = sum(stream.reset for stream in everybody)
        report.errors = [f"stream {stream.number}: {stream.error}" for stream in everybody if stream.error]
        report.errors += [
            f"stream {s.number} began at {s.node}, not {VICTIM}" for s in streams if s.node != VICTIM
        ]
        if newcomer.node != STANDBY:
            report.errors.append(f"after the notice a new answer came from {newcomer.node or 'nowhere'}")
        return streams, newcomer

    async def _notice(self, customer: Customer) -> Stream:
        """Returns the answer of the first customer who comes after it."""
        self.screen.scene(f"the provider announces that {VICTIM} will be reclaimed")
        url = f"{self.stack.addresses['IMDS_AWS_URL']}/{VICTIM}/_control"
        await _post_json(url, {"schedule": {"action": "terminate", "in_s": NOTICE_S}})

        async def flipped() -> bool:
            return bool((await _get_json(f"{self.stack.gateway_url}/healthz"))["flips"])

        await _until(flipped, "the gateway has not seen the notice")
        self.screen.say("the gateway has flipped: new answers go elsewhere, the open ones run on")
        self.screen.say(f"the notice says {NOTICE_S:.0f} s, but this provider will not wait that long")
        newcomer = Stream(STREAMS, "A good name for a cat is")
        await customer.stream(newcomer, tokens=SHORT_TOKENS)
        self.screen.say(f"a new customer was answered by {newcomer.node}")
        return newcomer

    async def _all_have(self, streams: Sequence[Stream], tokens: int) -> None:
        async def enough() -> bool:
            return all(len(stream.ids) >= tokens or stream.ended for stream in streams)

        await _until(enough, f"not every answer got to {tokens} tokens")

    async def _the_same_undisturbed(self, customer: Customer, streams: Sequence[Stream]) -> list[Stream]:
        self.screen.scene(f"the same {len(streams)} questions again, undisturbed, to compare word by word")
        again = [Stream(stream.number, stream.prompt) for stream in streams]
        watching = asyncio.create_task(self.screen.watch(again, TOKENS))
        try:
            await customer.stream_all(again)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return again

    async def _compare(self, streams: Sequence[Stream], again: Sequence[Stream], report: Report) -> None:
        """The tokenizer is the judge of the texts: it has no part in how a leg was joined to the next."""
        judge = await asyncio.to_thread(_load_tokenizer)
        for stream, undisturbed in zip(streams, again, strict=True):
            report.errors += (
                [f"stream {stream.number} again: {undisturbed.error}"] if undisturbed.error else []
            )
            # Every answer has exactly TOKENS tokens, whatever the model says.
            report.tokens_lost += max(0, TOKENS - len(stream.ids))
            report.tokens_duplicated += max(0, len(stream.ids) - TOKENS)
            said = judge.decode(stream.ids).rstrip("\ufffd")  # the last character may be unfinished
            report.texts_differing += stream.text.rstrip("\ufffd") != said
            report.answers_identical += stream.ids == undisturbed.ids and stream.text == undisturbed.text

    async def _bill(self, streams: Sequence[Stream], report: Report) -> None:
        self.screen.scene("the bill")
        requests = [stream.request_id for stream in streams]

        async def charged() -> bool:
            done = UsageEvent.objects.filter(request_id__in=requests, charged_at__isnull=False)
            return await done.acount() == len(requests)

        await _until(charged, "not every answer has been charged")
        report.delivered_tokens = sum(len(stream.ids) for stream in streams)
        usage = UsageEvent.objects.filter(request_id__in=requests).prefetch_related("legs")
        by_request = {str(event.request_id): event async for event in usage}
        report.charged_tokens = sum(event.completion_tokens for event in by_request.values())
        total = sum(event.amount or 0 for event in by_request.values())
        price = format_money(Money(total, "USD"))
        self.screen.say(
            f"{report.charged_tokens} tokens charged, {report.delivered_tokens} delivered: {price}"
        )
        for stream in streams:
            legs = list(by_request[stream.request_id].legs.all())
            if len(legs) > 1:
                report.resumed += 1
                cut = legs[0].completion_tokens
                if 0 < cut < len(stream.times):
                    report.resume_gap_ms.append((stream.times[cut] - stream.times[cut - 1]) * 1000)
        flips = Reroute.objects.filter(node__name=VICTIM, flipped_at__isnull=False).order_by("-id")
        async for signal_at, flipped_at, first_byte_at in flips[: report.evictions].values_list(
            "signal_at", "flipped_at", "first_byte_at"
        ):
            assert flipped_at is not None  # by the filter
            report.flip_ms.append((flipped_at - signal_at).total_seconds() * 1000)
            if first_byte_at:
                report.reroute_ms.append((first_byte_at - signal_at).total_seconds() * 1000)

    async def _books(self, report: Report) -> None:
        self.screen.scene("the books")
        lines = await sync_to_async(summarise)(self.credentials["pilot"]["customer_id"])
        for line in lines:
            self.screen.say(line)
        verified = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "manage.py", "ledger_verify", "--json"],
            cwd=BASE_DIR,
            env=self.stack.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            result = json.loads(verified.stdout)
        except ValueError:
            report.errors.append("ledger_verify gave no result")
            return
        report.ledger_ok = verified.returncode == 0 and result["ok"]
        self.screen.say(
            f"ledger_verify: {len(result['checks'])} checks, {'all hold' if report.ledger_ok else 'FAILED'}"
        )


def give_back(stack: Stack) -> None:
    """The provider offers the machine again: the notice is gone, and the node starts anew."""
    _call(_post(f"{stack.addresses['IMDS_AWS_URL']}/{VICTIM}/_control", {"cancel": True}))
    stack.process(VICTIM).restart()


def _load_tokenizer() -> Detokenizer:
    return Detokenizer(ensure_tokenizer(ensure_demo_model()).read_bytes())


async def _until(condition: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """Polls; raises StoryFailed when the condition does not come true."""
    deadline = time.monotonic() + _PATIENCE_S
    while not await condition():
        if time.monotonic() > deadline:
            raise StoryFailed(f"{otherwise} (waited {_PATIENCE_S:.0f} s; see var/log)")
        await asyncio.sleep(0.05)


async def _get_json(url: str) -> dict[str, Any]:
    return await asyncio.to_thread(_call, urllib.request.Request(url))


async def _post_json(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return await asyncio.to_thread(_call, _post(url, body))


def _post(url: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _call(request: urllib.request.Request) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.headers.get_content_type().endswith("json"):
            return json.load(error)
        raise
