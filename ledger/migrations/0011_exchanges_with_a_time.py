from django.db import migrations

from ledger.functions import install_functions


class Migration(migrations.Migration):
    dependencies = [("ledger", "0010_proposals")]
    operations = [migrations.RunPython(install_functions, migrations.RunPython.noop)]
