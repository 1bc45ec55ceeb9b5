import django.db.models.deletion
from django.db import migrations, models

from ledger.functions import install_functions


class Migration(migrations.Migration):
    dependencies = [
        ("ledger", "0012_lean_usage_indexes"),
    ]

    operations = [
        migrations.AlterField(
            model_name="hold",
            name="journal",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="holds",
                to="ledger.journal",
            ),
        ),
        migrations.RunPython(install_functions, migrations.RunPython.noop),
    ]
