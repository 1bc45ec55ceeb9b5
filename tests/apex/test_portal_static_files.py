"""Static files: what was vendored is what we say, and hashed names can be made of all of it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from django.core.management import call_command

VENDOR = Path(__file__).parents[2] / "static/vendor"


def test_vendored_files_are_unchanged():
    sums = dict(
        re.findall(r"^\| `([^`]+/[^`]+)` \| `([0-9a-f]{64})` \|$", (VENDOR / "VENDOR.md").read_text(), re.M)
    )
    found = {
        str(path.relative_to(VENDOR)): path
        for path in VENDOR.rglob("*")
        if path.parent != VENDOR and path.is_file()
    }
    assert set(sums) == set(found)
    for name, path in found.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sums[name], name


def test_every_file_that_another_names_is_there(settings, tmp_path):
    settings.STATIC_ROOT = tmp_path
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.ManifestStaticFilesStorage"}
    }
    call_command("collectstatic", interactive=False, verbosity=0)
    assert list(tmp_path.glob("apex.*.css"))
