"""Real servers for the tests, started once per run and only when a test needs them.

Loaded as a pytest plugin before Django reads its settings, so that DATABASE_URL and REDIS_URL can
name servers which do not run yet. Each run has its own folder, so runs do not disturb each other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from apex.local.postgres import APP_ROLE, OWNER_ROLE, SUPERUSER, EmbeddedPostgres
from apex.local.valkey import EmbeddedValkey

_home = Path(tempfile.mkdtemp(prefix="apex-test-"))
_home.chmod(0o711)  # PostgreSQL may run as another user and has to pass through
_postgres = EmbeddedPostgres(data=_home / "pg", sockets=_home / "pgs", durable=False)
_valkey = EmbeddedValkey(data=_home / "vk", sockets=_home / "vks")
_TEMPLATE = "apex_template"
_TEST_DATABASE = "apex_test"

os.environ.update(
    DATABASE_URL=_postgres.url(APP_ROLE, _TEST_DATABASE),
    DIRECT_URL=_postgres.url(OWNER_ROLE, _TEST_DATABASE),
    REDIS_URL=_valkey.url,
    SECRET_KEY="test-secret-key-that-is-long-enough-for-the-check",
    ALLOWED_HOSTS="localhost,127.0.0.1,testserver",
    APEX_VAR_DIR=str(_home / "var"),
    PAYPAL_MODE="stub",
    DJANGO_SETTINGS_MODULE="apex.settings",
    APEX_TESTING="1",
)


def pytest_unconfigure() -> None:
    shutil.rmtree(_home, ignore_errors=True)


def _admin(database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(_postgres.url(SUPERUSER, database), autocommit=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL of our own with the owner and app roles."""
    process = _postgres.spawn(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    _postgres.wait_ready(process)
    _postgres.provision()
    yield _postgres
    process.send_signal(2)
    process.wait(timeout=20)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EmbeddedValkey]:
    process = subprocess.Popen(_valkey.command(), stdout=subprocess.DEVNULL, start_new_session=True)
    _valkey.wait_ready(process)
    yield _valkey
    process.terminate()
    process.wait(timeout=10)


def _use_database(name: str, role: str = APP_ROLE) -> None:
    """Points Django at another database of the test server, in this thread and in later ones."""
    from django.db import connections

    connections.close_all()
    for config in (connections.settings["default"], connections["default"].settings_dict):
        config["NAME"], config["USER"] = name, role


@pytest.fixture(scope="session")
def database_template(postgres_server: EmbeddedPostgres, django_db_blocker) -> str:
    """A migrated, empty database that others are copied from. Migrated as owner, used as app role."""
    from django.core.management import call_command

    with _admin() as admin:
        admin.execute(f"CREATE DATABASE {_TEMPLATE} OWNER {OWNER_ROLE}")
    with django_db_blocker.unblock():
        _use_database(_TEMPLATE, OWNER_ROLE)
        call_command("migrate", verbosity=0)
        from django.db import connections

        connections.close_all()
    return _TEMPLATE


def _copy_database(name: str) -> None:
    with _admin() as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE} OWNER {OWNER_ROLE}")


def use_test_database() -> None:
    """Makes the database that ordinary tests share and roll back in."""
    _copy_database(_TEST_DATABASE)
    _use_database(_TEST_DATABASE)


@pytest.fixture
def fresh_database(django_db_setup: None, django_db_blocker) -> Iterator[str]:
    """A database of its own, for tests that commit, use threads or kill things.

    Django's way (truncate every table afterwards) cannot work here: the ledger's tables refuse it.
    The value is the name; `database_url(name, role)` gives an address for plain psycopg.
    """
    from django.db import connections

    name = f"apex_{uuid.uuid4().hex[:12]}"
    with django_db_blocker.unblock():
        _copy_database(name)
        _use_database(name)
        yield name
        connections.close_all()
        _use_database(_TEST_DATABASE)
    with _admin() as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def database_url(name: str, role: str = APP_ROLE) -> str:
    return _postgres.url(role, name)


@pytest.fixture
def redis_client(valkey_server: EmbeddedValkey):
    """A client on an emptied Valkey."""
    import redis

    client = redis.Redis.from_url(valkey_server.url, decode_responses=True)
    client.flushall()
    yield client
    client.close()
