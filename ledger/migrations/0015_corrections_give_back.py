import django.db.models.deletion
from django.db import migrations, models

from ledger.functions import install_functions


class Migration(migrations.Migration):
    dependencies = [
        ("ledger", "0014_bills_and_payouts"),
    ]

    operations = [
        migrations.CreateModel(
            name="UsageReturn",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("amount", models.DecimalField(decimal_places=9, max_digits=24)),
                (
                    "correction",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="gave_back",
                        to="ledger.usageline",
                    ),
                ),
                (
                    "line",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="returns",
                        to="ledger.usageline",
                    ),
                ),
            ],
            options={
                "db_table": "usage_return",
                "constraints": [
                    models.UniqueConstraint(fields=("correction", "line"), name="usage_return_once"),
                    models.CheckConstraint(
                        condition=models.Q(("amount__gt", 0)), name="usage_return_above_zero"
                    ),
                ],
            },
        ),
        migrations.RunPython(install_functions, migrations.RunPython.noop),
    ]
