"""Is it ready? Each probe answers within about two seconds and never raises for "not yet"."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable

from celery import Celery

from apex.local.postgres import EmbeddedPostgres

_TIMEOUT_S = 2.0
# Loopback only; a proxy from the environment has no business here.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Probe = Callable[[], bool]


def http_ok(url: str) -> Probe:
    """Ready when GET answers 200."""

    def ready() -> bool:
        try:
            with _opener.open(url, timeout=_TIMEOUT_S) as response:
                return bool(response.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    return ready


def http_answers(url: str) -> Probe:
    """Ready when GET gets any answer below 500: the program listens and its routes work."""

    def ready() -> bool:
        try:
            with _opener.open(url, timeout=_TIMEOUT_S):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500
        except (OSError, http.client.HTTPException):
            return False

    return ready


def celery_answers(broker_url: str, worker: str) -> Probe:
    """Ready when the worker of this name answers a ping through the broker."""
    app = Celery("probe", broker=broker_url, set_as_current=False)

    def ready() -> bool:
        try:
            return bool(app.control.inspect(destination=[worker], timeout=1.0).ping())
        except (app.connection_for_write().connection_errors, OSError):  # type: ignore[misc]
            return False

    return ready


def postgres_provisioned(database: EmbeddedPostgres) -> Probe:
    """Ready when the server answers and has our roles and database."""

    def ready() -> bool:
        if not database.is_running():
            return False
        database.provision()
        return True

    return ready


def every(*probes: Probe) -> Probe:
    return lambda: all(probe() for probe in probes)
