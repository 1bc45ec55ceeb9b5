from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("brokerage", "0010_low_balance"),
        # What is charged from here on has lines there.
        ("ledger", "0013_charges_at_delivery"),
    ]

    operations = [
        migrations.AlterField(
            model_name="usageevent",
            name="journal_id",
            field=models.BigIntegerField(db_index=True, editable=False, null=True),
        ),
    ]
