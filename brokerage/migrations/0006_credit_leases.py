from pathlib import Path

from django.conf import settings
from django.db import migrations
from psycopg import sql

FUNCTIONS = (Path(__file__).parent.parent / "sql" / "leases.sql").read_text()
REMOVE = "DROP FUNCTION lease_take, lease_carve, lease_return"
# They act as the owner of the ledger's tables, so nobody but the application may call them.
_OWNERS = (
    "lease_carve(bigint[], uuid[], numeric[], uuid[], uuid[], timestamptz[])",
    "lease_return(bigint, numeric)",
)


def restrict(apps, schema_editor):
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = %s)", [settings.DB_APP_ROLE])
        (role_exists,) = cursor.fetchone()
        for function in map(sql.SQL, _OWNERS):
            cursor.execute(sql.SQL("REVOKE ALL ON FUNCTION {} FROM PUBLIC").format(function))
            if role_exists:
                role = sql.Identifier(settings.DB_APP_ROLE)
                cursor.execute(sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(function, role))


class Migration(migrations.Migration):
    dependencies = [
        ("brokerage", "0005_kept_answers"),
        ("ledger", "0002_functions"),
    ]

    operations = [
        migrations.RunSQL(FUNCTIONS, REMOVE),
        migrations.RunPython(restrict, migrations.RunPython.noop),
    ]
