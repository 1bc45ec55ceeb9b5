from django.db import migrations

from ledger.functions import install_functions, read, remove_functions


class Migration(migrations.Migration):
    dependencies = [("ledger", "0001_initial_tables")]
    operations = [
        migrations.RunSQL(read("tables.sql"), read("tables_reverse.sql")),
        migrations.RunPython(install_functions, remove_functions),
    ]
