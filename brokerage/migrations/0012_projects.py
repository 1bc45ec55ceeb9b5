from pathlib import Path
from uuid import uuid4

import django.db.models.deletion
import django.db.models.functions.datetime
import django.db.models.functions.text
from django.db import migrations, models

SQL = Path(__file__).parent.parent / "sql"
PROJECTS = (SQL / "projects.sql").read_text()
# Its rows have got a column.
BUDGETS = "DROP FUNCTION budget_status(uuid);\n" + (SQL / "budgets.sql").read_text()

# Who is a customer already has a project too, and it has all keys that there are. The last line lets the checks of
# foreign keys run now: a table with checks to come cannot be altered.
DEFAULTS = """
INSERT INTO brokerage_project (id, customer_id, name, is_default)
    SELECT gen_random_uuid(), id, 'Default', true FROM brokerage_customer;
UPDATE brokerage_apikey k SET project_id = p.id
  FROM brokerage_project p WHERE p.customer_id = k.customer_id AND p.is_default;
SET CONSTRAINTS ALL IMMEDIATE;
"""
SAME_CUSTOMER = """
ALTER TABLE brokerage_apikey ADD CONSTRAINT apikey_project_of_customer
    FOREIGN KEY (project_id, customer_id) REFERENCES brokerage_project (id, customer_id);
ALTER TABLE brokerage_budget ADD CONSTRAINT budget_project_of_customer
    FOREIGN KEY (project_id, customer_id) REFERENCES brokerage_project (id, customer_id);
"""
NO_SAME_CUSTOMER = """
ALTER TABLE brokerage_apikey DROP CONSTRAINT apikey_project_of_customer;
ALTER TABLE brokerage_budget DROP CONSTRAINT budget_project_of_customer;
"""
NO_PROJECTS = "DROP FUNCTION project_make_default, project_take_key CASCADE"


class Migration(migrations.Migration):
    dependencies = [
        ("brokerage", "0011_usage_shares_journals"),
    ]

    operations = [
        migrations.CreateModel(
            name="Project",
            fields=[
                ("id", models.UUIDField(default=uuid4, editable=False, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=100)),
                ("is_default", models.BooleanField(default=False, editable=False)),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), editable=False
                    ),
                ),
                ("archived_at", models.DateTimeField(blank=True, editable=False, null=True)),
                (
                    "customer",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="projects",
                        to="brokerage.customer",
                    ),
                ),
            ],
            options={
                "ordering": ["-is_default", "name"],
                "constraints": [
                    models.UniqueConstraint(
                        models.F("customer"),
                        django.db.models.functions.text.Lower("name"),
                        condition=models.Q(("archived_at__isnull", True)),
                        name="project_name_once",
                        violation_error_message="You have a project of this name already.",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("is_default", True)),
                        fields=("customer",),
                        name="project_default_once",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("is_default", False), ("archived_at__isnull", True), _connector="OR"
                        ),
                        name="project_default_stays",
                    ),
                    models.UniqueConstraint(fields=("id", "customer"), name="project_of_customer"),
                ],
            },
        ),
        migrations.AddField(
            model_name="apikey",
            name="project",
            field=models.ForeignKey(
                editable=False,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="api_keys",
                to="brokerage.project",
            ),
        ),
        migrations.RunSQL(DEFAULTS, migrations.RunSQL.noop),
        migrations.AlterField(
            model_name="apikey",
            name="project",
            field=models.ForeignKey(
                editable=False,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="api_keys",
                to="brokerage.project",
            ),
        ),
        migrations.AlterField(
            model_name="budget",
            name="api_key",
            field=models.ForeignKey(
                blank=True,
                help_text="Empty: for all keys of the project, or of the customer, together.",
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="budgets",
                to="brokerage.apikey",
                verbose_name="API key",
            ),
        ),
        migrations.AddField(
            model_name="budget",
            name="project",
            field=models.ForeignKey(
                blank=True,
                help_text="Empty: not for one project.",
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="budgets",
                to="brokerage.project",
            ),
        ),
        migrations.RemoveConstraint(model_name="budget", name="budget_once"),
        migrations.AddConstraint(
            model_name="budget",
            constraint=models.UniqueConstraint(
                fields=("customer", "project", "api_key", "period"), name="budget_once", nulls_distinct=False
            ),
        ),
        migrations.AddConstraint(
            model_name="budget",
            constraint=models.CheckConstraint(
                condition=models.Q(("api_key__isnull", True), ("project__isnull", True), _connector="OR"),
                name="budget_of_key_or_project",
            ),
        ),
        migrations.RunSQL(SAME_CUSTOMER, NO_SAME_CUSTOMER),
        migrations.RunSQL(PROJECTS, NO_PROJECTS),
        migrations.RunSQL(BUDGETS, migrations.RunSQL.noop),
    ]
