"""Writes finished answers to PostgreSQL in groups: one COPY and one commit for all that wait."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import psycopg

from brokerage.admission.database import Connection, Pool, call
from brokerage.services.rating import rate_answer
from kernel_steer.admission import Answer

logger = logging.getLogger(__name__)

# While one group is being written the next one gathers, so a lone answer waits for nobody.
GROUP_MAX = 500
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
# Errors of the rows themselves. Whatever else fails may work a moment later.
_BAD_ROWS = (psycopg.IntegrityError, psycopg.DataError)

# Another layout needs another name: behind a pooler the tables outlive the gateway that made them.
# The staging tables have neither keys nor constraints: ON CONFLICT needs INSERT, COPY knows it not.
_STAGE = """
CREATE TEMP TABLE IF NOT EXISTS usage_staging_2 (
    request_id uuid, customer_id uuid, api_key_id uuid, served_model_id bigint, price_id bigint,
    hold_id bigint, currency text, outcome text, prompt_tokens int, completion_tokens int,
    started_at timestamptz, finished_at timestamptz, lease_id bigint, lease_amount numeric
) ON COMMIT DELETE ROWS;
CREATE TEMP TABLE IF NOT EXISTS leg_staging_2 (
    usage_id uuid, number smallint, node text, prompt_tokens int, completion_tokens int, ended text,
    lost_tokens int, lost_to text
) ON COMMIT DELETE ROWS
"""
_USAGE_COLUMNS = (
    "request_id, customer_id, api_key_id, served_model_id, price_id, hold_id, currency, outcome,"
    " prompt_tokens, completion_tokens, started_at, finished_at"
)
_LEASED_COLUMNS = "lease_id, lease_amount"
_LEG_COLUMNS = "usage_id, number, node, prompt_tokens, completion_tokens, ended, lost_tokens, lost_to"
_KEEP_USAGE = f"""
INSERT INTO usage_event ({_USAGE_COLUMNS}) SELECT {_USAGE_COLUMNS} FROM usage_staging_2
ON CONFLICT (request_id) DO NOTHING
"""  # noqa: S608
_CARVE = """
WITH carved AS (
    SELECT c.request_id, c.hold_id
      FROM (SELECT array_agg(lease_id) AS leases, array_agg(request_id) AS requests,
                   array_agg(lease_amount) AS amounts, array_agg(customer_id) AS customers,
                   array_agg(api_key_id) AS api_keys, array_agg(started_at) AS started
              FROM usage_staging_2 WHERE lease_id IS NOT NULL) s,
           lease_carve(s.leases, s.requests, s.amounts, s.customers, s.api_keys, s.started) c
)
UPDATE usage_staging_2 u SET hold_id = c.hold_id FROM carved c WHERE u.request_id = c.request_id
"""
_KEEP_LEGS = f"""
INSERT INTO brokerage_legcost ({_LEG_COLUMNS}) SELECT {_LEG_COLUMNS} FROM leg_staging_2
ON CONFLICT (usage_id, number) DO NOTHING
"""  # noqa: S608


class UnusableRecord(ValueError):
    """An answer whose journal record does not lead to a customer and a price."""


@dataclass(frozen=True, slots=True)
class _Rows:
    usage: tuple[Any, ...]
    legs: list[tuple[Any, ...]]
    leased: tuple[int, Decimal] | tuple[None, None] = (None, None)  # the lease, and what is carved out of it


class UsageWriter:
    """`write` returns when the answer is committed, however long PostgreSQL is away."""

    def __init__(self, pool: Pool, on_written: Callable[[], None]) -> None:
        self._pool = pool
        self._on_written = on_written
        self._waiting: list[tuple[_Rows, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="usage-writer")

    async def stop(self) -> None:
        """What is not written now stays in the gateway's journal: its `write` is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for _, done in self._waiting:
            done.cancel()
        self._waiting.clear()

    async def write(self, answer: Answer) -> None:
        """Once per request_id. Raises UnusableRecord when it can never be stored."""
        rows = _rows_of(answer)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((rows, done))
        self._wake.set()
        await done

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                group = self._waiting[:GROUP_MAX]
                await self._write_group(group)
                # Only now: a cancelled writer must find them when it stops.
                del self._waiting[: len(group)]

    async def _write_group(self, group: Sequence[tuple[_Rows, asyncio.Future[None]]]) -> None:
        try:
            await self._store([rows for rows, _ in group])
        except _BAD_ROWS as error:
            if len(group) == 1:
                logger.error("usage of request %s is refused: %s", group[0][0].usage[0], _first_line(error))
                _finish(group[0][1], UnusableRecord(_first_line(error)))
                return
            # One bad row must not hold up the others: find it.
            for single in group:
                await self._write_group([single])
            return
        for _, done in group:
            _finish(done, None)
        self._on_written()

    async def _store(self, group: list[_Rows]) -> None:
        """Tries until it is done. Raises one of _BAD_ROWS."""
        for attempt in itertools.count():
            try:
                await call(self._pool, lambda connection: _copy(connection, group))
                return
            except _BAD_ROWS:
                raise
            except (psycopg.Error, TimeoutError) as error:
                if attempt == 0:
                    logger.warning(
                        "usage of %d answers waits for PostgreSQL: %s", len(group), _first_line(error)
                    )
                await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])


def _finish(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():  # whoever waited was cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


async def _copy(connection: Connection, group: list[_Rows]) -> None:
    async with connection.transaction():
        await connection.execute(_STAGE)
        cursor = connection.cursor()
        columns = f"{_USAGE_COLUMNS}, {_LEASED_COLUMNS}"
        async with cursor.copy(f"COPY usage_staging_2 ({columns}) FROM STDIN") as copy:
            for rows in group:
                await copy.write_row((*rows.usage, *rows.leased))
        async with cursor.copy(f"COPY leg_staging_2 ({_LEG_COLUMNS}) FROM STDIN") as copy:
            for rows in group:
                for leg in rows.legs:
                    await copy.write_row(leg)
        if any(lease for rows in group for lease in rows.leased):
            await cursor.execute(_CARVE)
        await cursor.execute(_KEEP_USAGE)
        await cursor.execute(_KEEP_LEGS)


def _rows_of(answer: Answer) -> _Rows:
    record = answer.record
    leased: tuple[int, Decimal] | tuple[None, None] = (None, None)
    try:
        if record.get("rates") and (amount := leased_amount(answer)):
            leased = (int(record["hold_id"]), amount)
        usage = (
            uuid.UUID(answer.request_id),
            uuid.UUID(record["customer_id"]),
            uuid.UUID(record["key_id"]),
            int(record["served_model_id"]),
            int(record["price_id"]),
            None if record.get("rates") or record["hold_id"] is None else int(record["hold_id"]),
            str(record["currency"]),
            str(answer.outcome),
            answer.prompt_tokens,
            answer.completion_tokens,
            answer.started_at,
            # A clock that was set back must not make a bill impossible.
            max(answer.finished_at, answer.started_at),
        )
    except (KeyError, TypeError, ValueError, InvalidOperation) as error:
        raise UnusableRecord(f"request {answer.request_id}: its record is incomplete or malformed") from error
    legs = [
        (
            usage[0],
            leg.number,
            leg.node,
            leg.prompt_tokens,
            leg.completion_tokens,
            leg.ended,
            leg.repeated_tokens if leg.lost_to else 0,
            leg.lost_to if leg.repeated_tokens else "",
        )
        for leg in answer.legs
    ]
    return _Rows(usage, legs, leased)


def leased_amount(answer: Answer) -> Decimal:
    """What an answer under a credit lease costs: `rates` of its record, by the rule of the charge."""
    prompt_rate, completion_rate = map(Decimal, answer.record["rates"])
    return rate_answer(
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        prompt_rate=prompt_rate,
        completion_rate=completion_rate,
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
