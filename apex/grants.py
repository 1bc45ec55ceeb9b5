"""Least privilege: after every migration the app role gets what the product needs, and no more."""

from __future__ import annotations

import re
from typing import Any

from django.conf import settings
from django.db import connections
from psycopg import sql

from ledger.privileges import TABLE_PRIVILEGES

_ORDINARY = "SELECT, INSERT, UPDATE, DELETE"
_READ_ONLY = {"django_migrations": "SELECT"}


def grant_app_role(*, using: str = "default", **_: Any) -> None:
    """Idempotent; does nothing where the product runs as the owner of its tables."""
    role = settings.DB_APP_ROLE
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT current_user")
        if cursor.fetchone() == (role,):
            return
        cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        tables = [name for (name,) in cursor.fetchall()]
        cursor.execute(sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(sql.Identifier(role)))
        for table in tables:
            rights = TABLE_PRIVILEGES.get(table) or _READ_ONLY.get(table) or _ORDINARY
            rights = _on_columns_there(cursor, table, rights)
            names = (sql.Identifier(table), sql.Identifier(role))
            cursor.execute(sql.SQL("REVOKE ALL ON TABLE {} FROM {}").format(*names))
            cursor.execute(sql.SQL("GRANT " + rights + " ON TABLE {} TO {}").format(*names))  # type: ignore[arg-type]
        cursor.execute(
            sql.SQL("GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO {}").format(
                sql.Identifier(role)
            )
        )


def _on_columns_there(cursor: Any, table: str, rights: str) -> str:
    """Without the columns that later migrations add: this runs after a step back too."""
    if "(" not in rights:
        return rights
    cursor.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
        [f"public.{table}"],
    )
    there = {name for (name,) in cursor.fetchall()}
    named = re.compile(r"\(([^)]*)\)")
    return named.sub(
        lambda found: f"({', '.join(name for name in found[1].split(', ') if name in there)})", rights
    )
