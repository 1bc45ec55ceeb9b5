"""What the tests of the brokerage share."""

import pytest
import uvloop

from tests.brokerage.broker import admission, world

__all__ = ["admission", "world"]


def pytest_asyncio_loop_factories(config, item):
    """What runs inside the gateway is tested on the gateway's loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def plain_pages(settings):
    """No collected manifest of static files is needed, and passwords cost no time."""
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    }
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
