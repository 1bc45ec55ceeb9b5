"""The product runs with a database role that owns nothing."""

import psycopg
import pytest
from django.db import connection, transaction


@pytest.mark.django_db
def test_tests_run_as_the_app_role():
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_user, pg_has_role(current_user, 'apex_owner', 'member')")
        assert cursor.fetchone() == ("apex_app", False)


@pytest.mark.django_db
def test_app_role_may_not_change_the_schema():
    with (
        pytest.raises(Exception, match="permission denied") as caught,
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("CREATE TABLE public.intruder (id int)")
    assert isinstance(caught.value.__cause__, psycopg.errors.InsufficientPrivilege)


def test_fresh_database_is_committed_to_and_thrown_away(fresh_database):
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_database()")
        assert cursor.fetchone() == (fresh_database,)
