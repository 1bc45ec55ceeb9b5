from django.db import migrations

from ledger.functions import install_functions


class Migration(migrations.Migration):
    """Settlements and exchanges ask through which day the books are closed now, not ever."""

    dependencies = [("ledger", "0010_proposals")]
    operations = [migrations.RunPython(install_functions, migrations.RunPython.noop)]
