from pathlib import Path

import django.db.models.functions.datetime
from django.db import migrations, models

FUNCTIONS = (Path(__file__).parent.parent / "sql" / "leases.sql").read_text()


class Migration(migrations.Migration):
    dependencies = [
        ("brokerage", "0013_upstreams"),
    ]

    operations = [
        migrations.CreateModel(
            name="LeaseCall",
            fields=[
                ("account_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("called_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
        ),
        migrations.RunSQL(FUNCTIONS, "DROP FUNCTION lease_call_back"),
    ]
