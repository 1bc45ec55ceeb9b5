"""What the tests of the brokerage share."""

import pytest


@pytest.fixture(autouse=True)
def plain_pages(settings):
    """No collected manifest of static files is needed, and passwords cost no time."""
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    }
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
