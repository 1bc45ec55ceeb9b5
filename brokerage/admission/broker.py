"""BrokerageAdmission: who may call, what is held for it, where it goes, what was delivered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import psycopg
from django.conf import settings

from brokerage.admission import refusals
from brokerage.admission.charge_nudge import ChargeNudge
from brokerage.admission.database import AWAY, Connection, call, make_pool
from brokerage.admission.hazard import REFRESH_S as HAZARD_REFRESH_S
from brokerage.admission.hazard import Experience, Zone, load_experience
from brokerage.admission.keys import KeyRing
from brokerage.admission.leases import Leases
from brokerage.admission.limits import KeyLimits, RateLimits
from brokerage.admission.once import OnceStore
from brokerage.admission.placement import Placement
from brokerage.admission.snapshot import KnownCustomer, Snapshot, SoldModel, load_snapshot
from brokerage.admission.turns import Turns
from brokerage.admission.usage_writer import UsageWriter, leased_amount
from kernel_steer.admission import (
    Answer,
    Caller,
    FlipReport,
    ModelCard,
    Node,
    OnceKey,
    Outcome,
    Refusal,
    Ticket,
)
from kernel_steer.ports import Endpoint

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
HOLD_TTL = timedelta(minutes=15)
_START_TIMEOUT_S = 10.0
# The gateway's bound on prompt tokens is one per byte. Text of more bytes a token than this does not
# exist, so beyond it the prompt cannot fit; below, the node's own tokenizer decides.
_BYTES_PER_TOKEN_MAX = 16
# More choices than this cannot be asked for, and none is longer than the context.
_CHOICES_MAX = 16
_FLIP_TRIES = 6

_HOLD = "SELECT budget_hold_create(%s, %s, %s, %s, %s, %s, %s, %s)"
_FLIP = """
INSERT INTO reroute (node_id, epoch, signal_at, flipped_at, first_byte_at, flows)
SELECT id, %(epoch)s, %(signal_at)s, %(flipped_at)s, %(first_byte_at)s, %(flows)s
  FROM brokerage_node WHERE name = %(node)s
ON CONFLICT (node_id, epoch) DO UPDATE SET
    signal_at = LEAST(reroute.signal_at, EXCLUDED.signal_at),
    flipped_at = COALESCE(reroute.flipped_at, EXCLUDED.flipped_at),
    first_byte_at = COALESCE(reroute.first_byte_at, EXCLUDED.first_byte_at),
    flows = GREATEST(reroute.flows, EXCLUDED.flows)
"""

_OUT_OF_USE = """
UPDATE brokerage_node SET state = 'gone', state_reason = %s WHERE name = %s AND epoch = %s AND state = 'ready'
"""


class BrokerageAdmission:
    """Implements `kernel_steer.admission.Admission`; the contract is written there.

    Keys, prices and nodes are answered from a snapshot that is at most half a second old. Credit and
    usage always go to PostgreSQL.
    """

    def __init__(self) -> None:
        self._pool = make_pool()
        self._snapshot = Snapshot()
        self._keys = KeyRing(self._pool)
        self._rates = RateLimits(settings.REDIS_URL)
        # Refused by a rate limit, until they are abandoned: a flood of them must cost PostgreSQL nothing.
        self._never_held: set[str] = set()
        self._once = OnceStore(self._pool)
        self._leases = Leases(self._pool)
        self._placement = Placement()
        self._turns = Turns(self._room)
        self._experience: dict[Zone, Experience] = {}
        self._experience_at = float("-inf")
        self._nudge = ChargeNudge()
        self._writer = UsageWriter(self._pool, on_written=self._nudge.send)
        self._telling: set[asyncio.Task[None]] = set()
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._pool.open(wait=True, timeout=_START_TIMEOUT_S)
        await self._refresh()
        self._refresher = asyncio.create_task(self._refresh_forever(), name="admission-refresher")
        self._writer.start()
        self._rates.start()
        self._once.start()
        self._nudge.start()

    async def stop(self) -> None:
        if self._refresher is not None:
            self._refresher.cancel()
            with suppress(asyncio.CancelledError):
                await self._refresher
        await self._writer.stop()
        await self._leases.tidy(everything=True)
        await self._rates.stop()
        await self._once.stop()
        self._nudge.stop()
        await self._pool.close()

    # --- what is known by heart -------------------------------------------------------------------

    async def _refresh_forever(self) -> None:
        away = False
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._refresh()
            except (*AWAY, psycopg.Error) as error:  # whatever it is, the next read may succeed
                if not away:
                    logger.warning("PostgreSQL is away, known keys are still accepted: %s", error)
                away = True
            else:
                if away:
                    logger.info("PostgreSQL is back")
                away = False

    async def _refresh(self) -> None:
        if time.monotonic() - self._experience_at > HAZARD_REFRESH_S:
            self._experience = await call(self._pool, load_experience)
            self._experience_at = time.monotonic()
        self._snapshot = await call(
            self._pool, lambda connection: load_snapshot(connection, self._experience)
        )
        self._keys.update(self._snapshot)
        self._placement.update(self._snapshot.nodes)
        self._turns.advance()
        self._leases.heed(self._snapshot.called)
        await self._leases.tidy()

    # --- before an answer -------------------------------------------------------------------------

    async def authenticate(self, authorization: str | None) -> Caller:
        key = await self._keys.find(authorization)
        return Caller(key_id=key.key_id, customer_id=key.customer.customer_id)

    async def list_models(self, caller: Caller) -> Sequence[ModelCard]:
        currency = self._customer(caller).currency
        return [sold.card for (_, sold_in), sold in self._snapshot.models.items() if sold_in == currency]

    async def admit(
        self,
        caller: Caller,
        *,
        request_id: str,
        model: str,
        prompt_tokens_max: int,
        completion_tokens_max: int | None,
        choices: int = 1,
    ) -> Ticket:
        """`completion_tokens_max` is for all `choices` together; without it each may fill the context."""
        customer = self._customer(caller)
        sold = self._snapshot.models.get((model, customer.currency))
        if sold is None:
            raise Refusal(
                404,
                "model_not_found",
                f"The model {model!r} does not exist or is not sold to you.",
                param="model",
            )
        context = sold.card.context_tokens
        if prompt_tokens_max > context * _BYTES_PER_TOKEN_MAX:
            raise Refusal(
                400,
                "context_length_exceeded",
                f"This model's maximum context length is {context} tokens and the prompt is certainly longer."
                " Shorten the messages.",
                param="messages",
            )
        # The bound of the prompt may be far above the truth, and then the answer has more room than
        # the bound leaves. So each is held for by itself: too much for a while, never too little.
        prompt = min(prompt_tokens_max, context)
        completion = context * choices
        if completion_tokens_max is not None:
            completion = min(completion_tokens_max, context * _CHOICES_MAX)
        limits = self._snapshot.limits.get(caller.key_id)
        try:
            if limits is not None:
                await self._take(caller, limits, request_id, prompt + completion)
            await self._turn(caller, model, request_id)
            hold = await self._set_aside(caller, customer, sold, sold.cost(prompt, completion), request_id)
        except BaseException:  # also when the request was cancelled: nothing of it may stay taken
            self._turns.give(request_id)
            await asyncio.shield(self._rates.cancel(request_id))
            raise
        return Ticket(
            request_id=request_id,
            model=sold.card,
            completion_tokens_max=completion,
            record=_record(caller, sold) | hold | ({"limited": True} if limits else {}),
        )

    async def _take(self, caller: Caller, limits: KeyLimits, request_id: str, tokens_max: int) -> None:
        try:
            await self._rates.take(caller.key_id, limits, request_id=request_id, tokens_max=tokens_max)
        except Refusal:
            self._never_held.add(request_id)
            raise

    async def _turn(self, caller: Caller, model: str, request_id: str) -> None:
        try:
            await self._turns.take(model, caller.customer_id, request_id)
        except Refusal:
            self._never_held.add(request_id)
            raise

    def _customer(self, caller: Caller) -> KnownCustomer:
        customer = self._snapshot.customers.get(caller.customer_id)
        if customer is None:  # suspended, or its last key revoked, since it was authenticated
            raise Refusal(401, "invalid_api_key", "This API key is not valid any more.")
        return customer

    async def _set_aside(
        self, caller: Caller, customer: KnownCustomer, sold: SoldModel, amount: Decimal, request_id: str
    ) -> dict[str, Any]:
        """Where the credit for the request is: a lease of this gateway, or a hold of its own."""
        if amount and customer.customer_id not in self._snapshot.budgeted:
            lease = self._leases.reserve(customer, request_id, amount)
            if lease is not None:
                return {"hold_id": lease, "rates": [str(sold.prompt_rate), str(sold.completion_rate)]}
        hold = partial(self._hold, caller, customer, amount, request_id)
        try:
            return {"hold_id": await hold()}
        except Refusal as refusal:
            if refusal.status != 402:
                raise
            return {"hold_id": await self._leases.hold_with_all(customer, hold, refusal)}

    async def _hold(
        self, caller: Caller, customer: KnownCustomer, amount: Decimal, request_id: str
    ) -> int | None:
        """Credit and budgets in one statement; None for what costs nothing."""
        if amount == 0:
            return None
        # The name of the actor is where budget_recount reads the key from.
        hold = (
            customer.wallet_id,
            amount,
            customer.currency,
            request_id,
            HOLD_TTL,
            f"api_key:{caller.key_id}",
        )
        parameters = (*hold, caller.customer_id, caller.key_id)

        async def create(connection: Connection) -> int:
            cursor = await connection.execute(_HOLD, parameters)
            row = await cursor.fetchone()
            assert row is not None
            return int(row[0])

        try:
            return await call(self._pool, create)
        except AWAY:
            raise refusals.unavailable() from None
        except psycopg.Error as error:
            refusal = refusals.of_hold(error, amount, customer.currency)
            if refusal is None:
                raise
            raise refusal from None

    async def abandon(self, request_id: str, record: dict[str, Any]) -> None:
        self._turns.give(request_id)
        if request_id in self._never_held:
            self._never_held.remove(request_id)
            return
        limited_key = record.get("key_id") if record.get("limited") else None
        await self._rates.cancel(request_id, limited_key)
        if self._leases.release(request_id):
            return
        try:
            await call(
                self._pool, lambda connection: connection.execute("SELECT hold_void_by_key(%s)", [request_id])
            )
        except AWAY as error:
            # Nothing is lost: the hold ends by itself after HOLD_TTL.
            logger.warning("hold of request %s is left to expire: %s", request_id, error)

    async def begin_once(self, once: OnceKey, request_id: str) -> bytes | None:
        return await self._once.begin(once, request_id)

    async def keep_once(self, request_id: str, answer: bytes | None) -> None:
        await self._once.keep(request_id, answer)

    async def forget_once(self, request_id: str) -> None:
        await self._once.forget(request_id)

    # --- where it goes ----------------------------------------------------------------------------

    def choose_node(
        self, model: str, *, exclude: frozenset[str] = frozenset(), prefix: bytes = b""
    ) -> Node | None:
        return self._placement.choose(model, exclude, prefix)

    def _room(self, model: str) -> int | None:
        """How many answers may be under way: nodes read the next prompts while they answer."""
        slots = self._placement.room(model)
        return None if slots is None else int(slots * settings.GATEWAY_ANSWERS_PER_SLOT)

    def node_released(self, name: str, epoch: int) -> None:
        self._placement.release(name, epoch)

    def node_draining(self, name: str, epoch: int) -> None:
        self._placement.drain(name, epoch)

    def node_restored(self, name: str, epoch: int) -> None:
        self._placement.restore(name, epoch)

    def knows_node(self, name: str) -> bool:
        return name in self._snapshot.node_names

    def node_failed(self, name: str, epoch: int, reason: str) -> None:
        logger.warning("node %s is avoided for a while: %s", name, reason)
        self._placement.pause(name, epoch)

    def node_misconfigured(self, name: str, epoch: int, reason: str) -> None:
        self._placement.drain(name, epoch)
        task = asyncio.get_running_loop().create_task(self._tell_staff(name, epoch, reason))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_staff(self, name: str, epoch: int, reason: str) -> None:
        """Where they look for it: at the node. Every other gateway keeps off it with its next snapshot."""
        logger.error("node %s is out of use until staff have changed it: %s", name, reason)
        parameters = (f"out of use: {reason}"[:300], name, epoch)
        try:
            await call(self._pool, lambda connection: connection.execute(_OUT_OF_USE, parameters))
        except AWAY as error:
            logger.warning("that node %s is out of use is not stored: %s", name, error)

    def endpoints(self) -> Sequence[Endpoint]:
        return self._snapshot.endpoints

    # --- after it ---------------------------------------------------------------------------------

    async def settle(self, answer: Answer) -> None:
        # Before the books: an answer that has ended is not open, however long PostgreSQL is away.
        self._turns.give(answer.request_id)
        if answer.record.get("limited"):
            await self._rates.settle(
                answer.request_id,
                answer.record["key_id"],
                tokens=answer.prompt_tokens + answer.completion_tokens,
            )
        await self._writer.write(answer)
        if answer.record.get("rates"):
            self._leases.release(answer.request_id, leased_amount(answer))
        if (
            answer.outcome is Outcome.RECOVERED
        ):  # its gateway died: whoever asks again need not wait for the lease
            await self._once.forget(answer.request_id)

    async def report_flip(self, report: FlipReport) -> None:
        parameters = {
            "node": report.node,
            "epoch": report.epoch,
            "signal_at": report.signal_at,
            "flipped_at": report.flipped_at,
            "first_byte_at": report.first_byte_at,
            "flows": report.flows,
        }
        for attempt in range(_FLIP_TRIES):
            try:
                cursor = await call(self._pool, lambda connection: connection.execute(_FLIP, parameters))
            except AWAY as error:
                logger.warning("flip of %s is not stored yet: %s", report.node, error)
                await asyncio.sleep(0.2 * 2**attempt)
                continue
            if cursor.rowcount == 0:
                logger.warning("flip of %s dropped: no node has that name", report.node)
            return
        logger.error("flip of %s is lost: PostgreSQL was away for too long", report.node)


def _record(caller: Caller, sold: SoldModel) -> dict[str, Any]:
    return {
        "customer_id": caller.customer_id,
        "key_id": caller.key_id,
        "served_model_id": sold.served_model_id,
        "price_id": sold.price_id,
        "currency": sold.currency,
    }
