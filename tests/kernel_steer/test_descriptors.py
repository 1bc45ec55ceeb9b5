"""A gateway takes all the open files there are, and says when they are too few."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging, resource
from kernel_steer.gateway.descriptors import raise_file_limit
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000))
print(raise_file_limit({answers}), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def start(answers: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", SCRIPT.format(answers=answers)]
    return subprocess.run(argv, capture_output=True, text=True, check=True)


def test_the_hard_limit_is_taken():
    done = start(300)
    assert (done.stdout, done.stderr) == ("1000 (1000, 1000)\n", "")


def test_a_limit_that_is_too_low_is_said_with_what_would_do():
    done = start(10_000)
    assert done.stdout == "1000 (1000, 1000)\n"
    assert done.stderr.startswith(
        "10000 answers at a time need 20256 open files, but the limit is 1000: raise it"
    )
