"""Reading the environment: every problem is collected, none shows a value."""

from __future__ import annotations

import pytest

from apex.env import Env


def problems_of(read, **environ: str) -> list[str]:
    env = Env(environ)
    read(env)
    return env.problems


def test_given_values_win_over_fallback_and_default():
    env = Env({"A": "environment", "B": "  "}, fallback={"A": "fallback", "B": "fallback"})
    assert [env.text("A", "default"), env.text("B", "default"), env.text("C", "default")] == [
        "environment",
        "fallback",
        "default",
    ]
    assert env.problems == []


def test_a_missing_value_without_default_is_a_problem():
    assert problems_of(lambda env: env.text("TOKEN")) == ["TOKEN is not set"]


@pytest.mark.parametrize("value", ["x", "1.5", "0x10", "--1"])
def test_a_number_must_be_whole(value):
    assert problems_of(lambda env: env.integer("PORT", 1, low=1, high=9), PORT=value) == [
        "PORT must be a whole number"
    ]


@pytest.mark.parametrize("value", ["21000", "a-b", "5-4", "0-9", "1-65536", "1-2-3", "-"])
def test_a_range_of_ports_is_first_and_last(value):
    assert problems_of(lambda env: env.ports("PORTS", "1-9"), PORTS=value) == [
        "PORTS must be FIRST-LAST, for instance 1-9"
    ]
    assert Env({}).ports("PORTS", "1-9") == (1, 9)


@pytest.mark.parametrize("value", ["0", "10", "-3"])
def test_a_number_must_be_in_range(value):
    assert problems_of(lambda env: env.integer("PORT", 1, low=1, high=9), PORT=value) == [
        "PORT must be between 1 and 9"
    ]


@pytest.mark.parametrize(("value", "expected"), [("yes", True), ("TRUE", True), ("0", False), ("off", False)])
def test_truth(value, expected):
    assert Env({"FLAG": value}).boolean("FLAG", not expected) is expected


def test_anything_else_is_not_truth():
    assert problems_of(lambda env: env.boolean("FLAG", False), FLAG="perhaps") == [
        "FLAG must be true or false"
    ]


def test_a_choice_names_what_it_may_be():
    assert problems_of(lambda env: env.choice("MODE", "a", ["a", "b"]), MODE="c") == [
        "MODE must be one of a, b"
    ]


def test_items_are_separated_by_commas():
    assert Env({"HOSTS": " a, b ,,c"}).items("HOSTS", "") == ["a", "b", "c"]


@pytest.mark.parametrize(
    "value",
    [
        "redis://host",
        "redis://:secret@host:6379/0",
        "redis://[::1]:6379",
        "unix:///run/valkey.sock",
        "postgresql:///db?host=/run/postgres",
    ],
)
def test_a_good_url(value):
    env = Env({"URL": value})
    assert env.url("URL", None, ["redis", "unix", "postgresql"]) == value
    assert env.problems == []


@pytest.mark.parametrize(
    "value",
    [
        "hunter2",
        "host:6379",
        "http://host",
        "redis://",
        "redis://:hunter2@host:port",
        "redis://[::1",
        "redis://a b",
    ],
)
def test_a_bad_url_is_told_without_showing_it(value):
    assert problems_of(lambda env: env.url("URL", None, ["redis", "unix"]), URL=value) == [
        "URL must be a URL that starts with redis:// or unix:// and names a host"
    ]
