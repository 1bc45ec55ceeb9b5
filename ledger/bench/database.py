"""A migrated, empty database on the running server, dropped afterwards."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psycopg
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_ALIAS = "ledger_bench"


@contextmanager
def throw_away_database() -> Iterator[str]:
    """Gives the address of the new database, as the application's role.

    Raises CommandError where no role at hand may create databases. A run that is killed leaves a
    database called apex_bench_... behind.
    """
    name = f"apex_bench_{uuid.uuid4().hex[:12]}"
    owner = conninfo_to_dict(settings.DIRECT_URL)
    with _creator() as admin:
        create = sql.SQL("CREATE DATABASE {} OWNER {}")
        admin.execute(create.format(sql.Identifier(name), sql.Identifier(str(owner["user"]))))
        try:
            _migrate(name, owner)
            yield make_conninfo(settings.DATABASE_URL, dbname=name)
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _creator() -> psycopg.Connection[tuple[object, ...]]:
    """The owner of our tables when it may create databases, else the superuser of an embedded server."""
    for url in (settings.DIRECT_URL, make_conninfo(settings.DIRECT_URL, user="postgres", dbname="postgres")):
        try:
            connection = psycopg.connect(url, autocommit=True)
        except psycopg.OperationalError:
            continue
        may = connection.execute(
            "SELECT rolsuper OR rolcreatedb FROM pg_roles WHERE rolname = current_user"
        ).fetchone()
        if may == (True,):
            return connection
        connection.close()
    raise CommandError("the benchmark needs a server that runs, and DIRECT_URL with a role that has CREATEDB")


def _migrate(name: str, owner: Mapping[str, object]) -> None:
    connections.settings[_ALIAS] = {
        **connections.settings["default"],
        "NAME": name,
        "USER": owner["user"],
        "PASSWORD": owner.get("password", ""),
    }
    try:
        call_command("migrate", "ledger", database=_ALIAS, verbosity=0)
    finally:
        connections[_ALIAS].close()
        del connections[_ALIAS]
        del connections.settings[_ALIAS]
