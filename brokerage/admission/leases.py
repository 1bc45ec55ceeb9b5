"""Credit leases: for a wallet that is asked for often, a hold that covers many requests beforehand.

A request under a lease costs no round trip: `reserve` and `release` are arithmetic. What an answer cost is
carved out of the lease in the statement that stores its usage (sql/leases.sql). The lease never gives more
than its hold has, so no number of gateways overspends a wallet.

Only a wallet with plenty is leased from: the share is small, so that little lies idle at another gateway,
and where credit runs short every request is held for by itself, exactly. Before a request is refused, all
gateways are asked for what they have leased of its wallet and do not need.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import TypeVar

import psycopg
from psycopg_pool import PoolTimeout, TooManyRequests

from brokerage.admission.database import AWAY, Connection, Pool, call, call_once
from brokerage.admission.snapshot import KnownCustomer
from kernel_steer.admission import Refusal

logger = logging.getLogger(__name__)
Held = TypeVar("Held")

# A lease begins when so many requests of a wallet went to the database within a second.
BEGIN_AT = 8
# It covers so many requests like the last one; at least LEAST, and at most a SHARE of what is available.
REQUESTS, LEAST, SHARE = 64, 4, 16
# It takes no new requests after this long, and is given back when nobody asked for so long.
ADMITS_S, IDLE_S = 30.0, 2.0
# After that its hold expires, as that of a single request would: longer than any answer.
TTL = timedelta(minutes=15)
# A wallet that had nothing to lease is not asked again for so long.
SHUN_S = 5.0
_ASK_AGAIN_S = 1.0
# How long a request that would be refused waits for what others have leased: they look every half second.
RECALL_S, _LOOK_S = 1.5, 0.05
_FORGET_S = 60.0

_TAKE = "SELECT hold_id, amount FROM lease_take(%s, %s, %s, %s, %s, %s, %s, %s)"
_RETURN = "SELECT lease_return(%s, %s)"
_CALL_BACK = "SELECT others, called_before FROM lease_call_back(%s, %s)"


@dataclass(slots=True, eq=False)
class Lease:
    """`left` and what is reserved is together what the hold has, but for what is carved already."""

    hold_id: int
    left: Decimal
    taken_at: float
    used_at: float
    reserved: dict[str, Decimal] = field(default_factory=dict)  # by request id


@dataclass(slots=True, eq=False)
class _Wallet:
    customer: KnownCustomer
    lease: Lease | None = None
    asked: deque[float] = field(default_factory=lambda: deque(maxlen=BEGIN_AT))
    shunned_until: float = 0.0
    taking: asyncio.Task[None] | None = None
    calling: asyncio.Task[bool | None] | None = None
    returned_at: float = float("-inf")
    returning: asyncio.Lock = field(default_factory=asyncio.Lock)


class Leases:
    def __init__(self, pool: Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._wallets: dict[int, _Wallet] = {}
        self._of_request: dict[str, Lease] = {}
        self._over: set[Lease] = set()  # take no new requests; what is left goes back

    # --- one request --------------------------------------------------------------------------------

    def reserve(self, customer: KnownCustomer, request_id: str, amount: Decimal) -> int | None:
        """The hold of the lease that covers the request; None when it needs one of its own. Never waits."""
        if (known := self._of_request.get(request_id)) is not None:
            return known.hold_id
        wallet = self._wallets.get(customer.wallet_id)
        if wallet is None:
            wallet = self._wallets[customer.wallet_id] = _Wallet(customer)
        now, lease = self._clock(), wallet.lease
        if lease is not None and lease.left >= amount:
            lease.left -= amount
            lease.reserved[request_id] = amount
            lease.used_at = now
            self._of_request[request_id] = lease
            if lease.left < amount * REQUESTS / 4 or now - lease.taken_at > ADMITS_S / 2:
                self._take_soon(wallet, amount)
            return lease.hold_id
        wallet.asked.append(now)
        if lease is not None or (len(wallet.asked) == BEGIN_AT and now - wallet.asked[0] <= 1.0):
            self._take_soon(wallet, amount)
        return None

    def release(self, request_id: str, spent: Decimal = Decimal(0)) -> bool:
        """The request is over and `spent` was carved out for it. False when no lease of ours covers it."""
        lease = self._of_request.pop(request_id, None)
        if lease is None:
            return False
        lease.left += lease.reserved.pop(request_id) - spent
        return True

    # --- leases -------------------------------------------------------------------------------------

    def _take_soon(self, wallet: _Wallet, amount: Decimal) -> None:
        if wallet.taking is None and self._clock() >= wallet.shunned_until:
            wallet.taking = asyncio.get_running_loop().create_task(self._take(wallet, amount))

    async def _take(self, wallet: _Wallet, amount: Decimal) -> None:
        customer, now = wallet.customer, self._clock()
        parameters = (
            customer.wallet_id,
            customer.currency,
            customer.customer_id,
            f"lease:{uuid.uuid4()}",
            amount * REQUESTS,
            amount * LEAST,
            SHARE,
            TTL,
        )

        async def take(connection: Connection) -> tuple[int | None, Decimal | None]:
            row = await (await connection.execute(_TAKE, parameters)).fetchone()
            assert row is not None
            return row[0], row[1]

        hold_id = taken = None
        try:
            hold_id, taken = await call_once(self._pool, take)
        except (*AWAY, psycopg.Error) as error:  # not enough any more, or away: every request by itself
            logger.info("no lease: %s", (str(error) or type(error).__name__).splitlines()[0])
        finally:
            wallet.taking = None
        if hold_id is None or taken is None:
            wallet.shunned_until = now + SHUN_S
            return
        if wallet.lease is not None:
            self._over.add(wallet.lease)
        wallet.lease = Lease(hold_id, taken, now, now)

    async def hold_with_all(
        self, customer: KnownCustomer, hold: Callable[[], Awaitable[Held]], refusal: Refusal
    ) -> Held:
        """`hold` was refused for want of credit. It is tried again with what this gateway has leased and does not
        need, then with what others have. Raises what `hold` raises at last."""
        if await self._give_back(customer):
            try:
                return await hold()
            except Refusal as error:
                refusal = error
        deadline = self._clock() + RECALL_S
        while refusal.status == 402 and (more := await self._call_back(customer, deadline)) is not None:
            try:
                return await hold()
            except Refusal as error:
                refusal = error
            if not more:
                break
        raise refusal

    async def _give_back(self, customer: KnownCustomer) -> bool:
        """Gives the wallet what no request needs, for one that was refused. Whether asking again makes sense."""
        wallet = self._wallets.get(customer.wallet_id)
        if wallet is None:
            return False
        async with wallet.returning:
            if wallet.taking is not None:
                await wallet.taking
            if wallet.lease is not None:
                wallet.shunned_until = self._clock() + SHUN_S
                self._end(wallet)
                await self._return_all()
                wallet.returned_at = self._clock()
            # Also for the one that was refused with it: what came back is for whoever asks first.
            return self._clock() - wallet.returned_at < _ASK_AGAIN_S

    async def _call_back(self, customer: KnownCustomer, deadline: float) -> bool | None:
        """Waits until another gateway has given something back: True. False when nothing more will come; None when
        nothing was to come at all. All requests of a wallet wait together."""
        wallet = self._wallets.setdefault(customer.wallet_id, _Wallet(customer))
        if wallet.calling is None:
            wallet.calling = asyncio.get_running_loop().create_task(self._wait_for_others(wallet, deadline))
        return await asyncio.shield(wallet.calling)

    async def _wait_for_others(self, wallet: _Wallet, deadline: float) -> bool | None:
        try:
            first, called_before = await self._others(wallet)
            if not first:
                return False if called_before else None
            while self._clock() < deadline:
                await asyncio.sleep(_LOOK_S)
                if (await self._others(wallet))[0] < first:
                    return True
            return False
        except (*AWAY, psycopg.Error) as error:
            logger.info("other gateways cannot be asked for credit: %s", type(error).__name__)
            return None
        finally:
            wallet.calling = None

    async def _others(self, wallet: _Wallet) -> tuple[Decimal, bool]:
        own = [lease.hold_id for lease in (wallet.lease, *self._over) if lease is not None]

        async def look(connection: Connection) -> tuple[Decimal, bool]:
            row = await (await connection.execute(_CALL_BACK, (wallet.customer.wallet_id, own))).fetchone()
            assert row is not None
            return row[0], row[1]

        return await call(self._pool, look)

    def heed(self, called: Iterable[int]) -> None:
        """Somebody is short of credit in these wallets: what no request needs goes back with the next `tidy`."""
        for wallet_id in called:
            if (wallet := self._wallets.get(wallet_id)) is not None:
                wallet.shunned_until = self._clock() + SHUN_S
                self._end(wallet)

    def _end(self, wallet: _Wallet) -> None:
        if wallet.lease is not None:
            self._over.add(wallet.lease)
            wallet.lease = None

    async def tidy(self, *, everything: bool = False) -> None:
        """Ends leases that are old or idle, and gives back what is left of those that have ended."""
        now = self._clock()
        for wallet_id, wallet in list(self._wallets.items()):
            lease = wallet.lease
            if lease is not None and (
                everything or now - lease.taken_at > ADMITS_S or now - lease.used_at > IDLE_S
            ):
                self._end(wallet)
            elif (
                lease is None
                and wallet.taking is None
                and wallet.calling is None
                and (not wallet.asked or now - wallet.asked[-1] > _FORGET_S)
            ):
                del self._wallets[wallet_id]
        await self._return_all()

    async def _return_all(self) -> None:
        for lease in list(self._over):
            amount, lease.left = lease.left, Decimal(0)
            if amount > 0 and not await self._return(lease.hold_id, amount):
                lease.left += amount
                return  # the others would wait as long, in vain
            if not lease.reserved and lease.left <= 0:
                self._over.discard(lease)

    async def _return(self, hold_id: int, amount: Decimal) -> bool:
        """False when it was certainly not done. What may have been done is never done again: at worst the
        rest of the lease is held until it expires."""
        try:
            await call_once(self._pool, lambda connection: connection.execute(_RETURN, (hold_id, amount)))
        except (PoolTimeout, TooManyRequests):
            return False
        except AWAY as error:
            logger.warning("credit lease %d is left to expire: %s", hold_id, error)
        return True
