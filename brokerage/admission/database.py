"""The gateway's own connections to Django's default database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psycopg
from django.db import connections
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout, TooManyRequests

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Pool = AsyncConnectionPool[Connection]
Result = TypeVar("Result")

# What it looks like when the database is away, restarting or out of reach.
AWAY = (psycopg.OperationalError, psycopg.InterfaceError, TimeoutError)
CALL_TIMEOUT_S = 5.0
_WAIT_FOR_CONNECTION_S = 1.0


def make_pool() -> Pool:
    """Not open yet. Reads the address when called, so that tests can switch databases before."""
    config = connections["default"].settings_dict
    conninfo = make_conninfo(
        "",
        **{
            **config["OPTIONS"],
            "dbname": config["NAME"],
            "user": config["USER"] or None,
            "password": config["PASSWORD"] or None,
            "host": config["HOST"] or None,
            "port": config["PORT"] or None,
            "connect_timeout": 3,
            "application_name": "apex-gateway",
        },
    )
    return AsyncConnectionPool(
        conninfo,
        # No prepared statements: a pooler in transaction mode may stand between.
        kwargs={"autocommit": True, "prepare_threshold": None},
        min_size=2,
        max_size=8,
        timeout=_WAIT_FOR_CONNECTION_S,
        max_waiting=1000,
        # How long it keeps trying in the background; then the next call tries anew.
        reconnect_timeout=5.0,
        open=False,
        name="admission",
    )


async def call(pool: Pool, work: Callable[[Connection], Awaitable[Result]]) -> Result:
    """Runs idempotent `work` on a connection, twice if the first one turns out to be stale.

    A restart of PostgreSQL leaves dead connections in the pool; the first that is met has the others
    replaced. Raises one of AWAY when the database cannot be reached in time.
    """
    try:
        return await call_once(pool, work)
    except (PoolTimeout, TooManyRequests):
        raise
    except psycopg.OperationalError:
        await pool.check()
        return await call_once(pool, work)


async def call_once(pool: Pool, work: Callable[[Connection], Awaitable[Result]]) -> Result:
    """For work that must not be done twice."""
    async with asyncio.timeout(CALL_TIMEOUT_S), pool.connection() as connection:
        return await work(connection)
