"""Fixtures that must override those of other plugins; the servers are in tests/services.py."""

import pytest

from tests.services import use_test_database


@pytest.fixture(scope="session")
def django_db_setup(database_template: str, django_db_blocker) -> None:
    """Replaces pytest-django's: the tests run as the app role, which may not create databases."""
    with django_db_blocker.unblock():
        use_test_database()
