"""What the tests of the site share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain_static_files(settings):
    """Hashed names need collectstatic first; test_static_files checks that once for all."""
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    }
