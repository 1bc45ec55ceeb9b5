"""A wrong configuration ends the start with one line for each mistake, status 78, and no secret shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex.local.paths import BASE_DIR

SECRET = "hunter2-hunter2-hunter2-hunter2-hunter2"
PRODUCTION = {
    "DATABASE_URL": f"postgresql://apex:{SECRET}@db.example.com/apex",
    "REDIS_URL": f"rediss://:{SECRET}@kv.example.com",
    "SECRET_KEY": SECRET,
    "ALLOWED_HOSTS": "apex.example.com",
    "APEX_PUBLIC_URL": "https://apex.example.com",
    "PAYPAL_MODE": "stub",
}


def load_settings(tmp_path: Path, code: str = "", **environ: str | None) -> subprocess.CompletedProcess[str]:
    """Imports the settings in a process of their own; None takes a variable away."""
    given = {"PATH": os.environ["PATH"], "APEX_VAR_DIR": str(tmp_path / "var"), **environ}
    return subprocess.run(
        [sys.executable, "-c", f"from apex import settings\n{code}"],
        env={name: value for name, value in given.items() if value is not None},
        cwd=BASE_DIR,
        capture_output=True,
        text=True,
        timeout=60,
    )


def complaints(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 78, result.stderr
    assert SECRET not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    prefix = "apex: configuration: "
    lines = result.stderr.splitlines()
    assert all(line.startswith(prefix) for line in lines), lines
    return [line.removeprefix(prefix) for line in lines]


def test_nothing_has_to_be_set_for_the_embedded_defaults(tmp_path):
    result = load_settings(tmp_path, "print(settings.PUBLIC_URL, settings.SECRET_KEY != '')")
    assert (result.stdout, result.stderr) == ("http://127.0.0.1:8000 True\n", "")


def test_the_secret_key_is_made_once_and_kept_for_its_owner_alone(tmp_path):
    first, second = (load_settings(tmp_path, "print(settings.SECRET_KEY)").stdout for _ in range(2))
    assert first == second
    assert len(first) > 50
    assert (tmp_path / "var" / "secret_key").stat().st_mode & 0o077 == 0


def test_a_complete_production_configuration(tmp_path):
    result = load_settings(tmp_path, "print(settings.SESSION_COOKIE_SECURE)", **PRODUCTION)
    assert (result.stdout, result.stderr) == ("True\n", "")
    assert not (tmp_path / "var").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"SECRET_KEY": None}, "SECRET_KEY is not set (it is needed as soon as DATABASE_URL names a server)"),
        ({"SECRET_KEY": "hunter2"}, "SECRET_KEY must have at least 32 characters"),
        ({"ALLOWED_HOSTS": " , "}, "ALLOWED_HOSTS is not set"),
        ({"ALLOWED_HOSTS": None}, "ALLOWED_HOSTS is not set"),
        (
            {"DATABASE_URL": f"mysql://apex:{SECRET}@db/apex"},
            "DATABASE_URL must be a URL that starts with postgres:// or postgresql:// and names a host",
        ),
        (
            {"DATABASE_URL": f"apex:{SECRET}@db/apex"},
            "DATABASE_URL must be a URL that starts with postgres:// or postgresql:// and names a host",
        ),
        (
            {"DATABASE_URL": f"postgresql://apex:%zz{SECRET}@db/apex"},
            "DATABASE_URL is not a valid PostgreSQL URL",
        ),
        ({"DATABASE_URL": f"postgresql://db/apex?{SECRET}=1"}, "DATABASE_URL is not a valid PostgreSQL URL"),
        ({"DIRECT_URL": f"postgresql://db/apex?{SECRET}=1"}, "DIRECT_URL is not a valid PostgreSQL URL"),
        (
            {"REDIS_URL": f"redis://:{SECRET}@kv:port"},
            "REDIS_URL must be a URL that starts with redis:// or rediss:// or unix:// and names a host",
        ),
        ({"APEX_WEB_PORT": "http"}, "APEX_WEB_PORT must be a whole number"),
        ({"APEX_GATEWAY_PORT": "70000"}, "APEX_GATEWAY_PORT must be between 1 and 65535"),
        ({"APEX_ENGINE": "warp"}, "APEX_ENGINE must be one of auto, kernel, relay"),
        (
            {"APEX_PUBLIC_URL": "apex.example.com"},
            "APEX_PUBLIC_URL must be a URL that starts with http:// or https:// and names a host",
        ),
        (
            {"IMDS_AWS_URL": "169.254.169.254"},
            "IMDS_AWS_URL must be a URL that starts with http:// and names a host",
        ),
        ({"PAYPAL_MODE": None}, "PAYPAL_MODE must be one of stub, sandbox, live"),
        ({"PAYPAL_MODE": "test"}, "PAYPAL_MODE must be one of stub, sandbox, live"),
        ({"PAYPAL_MODE": "live", "PAYPAL_CLIENT_ID": "a"}, "PAYPAL_CLIENT_SECRET is not set"),
        ({"LOG_LEVEL": "loud"}, "LOG_LEVEL must be one of DEBUG, INFO, WARNING, ERROR"),
    ],
)
def test_one_mistake_is_one_line(tmp_path, change, complaint):
    assert complaints(load_settings(tmp_path, **{**PRODUCTION, **change})) == [complaint]


def test_all_mistakes_are_told_at_once(tmp_path):
    wrong = {"SECRET_KEY": None, "ALLOWED_HOSTS": None, "APEX_ENGINE": "warp", "APEX_WEB_PORT": "no"}
    found = complaints(load_settings(tmp_path, **{**PRODUCTION, **wrong}))
    assert [line.split()[0] for line in found] == [
        "SECRET_KEY",
        "ALLOWED_HOSTS",
        "APEX_WEB_PORT",
        "APEX_ENGINE",
    ]


def test_a_var_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    [complaint] = complaints(load_settings(tmp_path, APEX_VAR_DIR=str(tmp_path / "file" / "var")))
    assert complaint == f"APEX_VAR_DIR cannot be used: {tmp_path / 'file' / 'var'}: Not a directory"


def test_a_command_says_the_same_before_it_starts_servers(tmp_path):
    (tmp_path / "file").touch()
    environ = {"PATH": os.environ["PATH"], "APEX_VAR_DIR": str(tmp_path / "file" / "var")}
    result = subprocess.run(
        [sys.executable, "manage.py", "showmigrations"],
        env=environ,
        cwd=BASE_DIR,
        capture_output=True,
        text=True,
    )
    [complaint] = complaints(result)
    assert complaint.startswith("APEX_VAR_DIR cannot be used: ")


def test_addresses_of_a_running_stack_are_found_and_those_of_a_dead_one_are_not(tmp_path):
    from apex.local.state import StateFolder

    state = StateFolder(tmp_path / "var")
    show = "print(settings.PAYPAL_STUB_URL, settings.GATEWAY_PUBLIC_URL)"
    with state.lock():
        state.write([], {"PAYPAL_STUB_URL": "http://127.0.0.1:9", "APEX_GATEWAY_PORT": "10"})
        assert load_settings(tmp_path, show).stdout == "http://127.0.0.1:9 http://127.0.0.1:10\n"
        explicit = load_settings(tmp_path, show, PAYPAL_STUB_URL="http://127.0.0.1:11")
        assert explicit.stdout == "http://127.0.0.1:11 http://127.0.0.1:10\n"
    assert load_settings(tmp_path, show).stdout == "http://127.0.0.1:8099 http://127.0.0.1:8080\n"
