from django.db import migrations

from ledger.functions import install_functions


class Migration(migrations.Migration):
    dependencies = [("ledger", "0007_paypal_returns_and_reconciliation")]
    operations = [migrations.RunPython(install_functions, migrations.RunPython.noop)]
