"""Open files: every answer needs one for its client and one for its node."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("kernel_steer.gateway")
_PER_ANSWER = 2
# Listeners, journal, maps, database, Redis, and clients who are connected and ask nothing at the moment.
_BESIDE = 256


def raise_file_limit(answers: int) -> int:
    """Takes what the system allows; says so in the log when that is too little. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = _PER_ANSWER * answers + _BESIDE
    if hard != resource.RLIM_INFINITY and hard < wanted:
        log.warning(
            "%d answers at a time need %d open files, but the limit is %d: raise it (ulimit -Hn, LimitNOFILE) "
            "or lower APEX_KERNEL_FLOWS; clients beyond it wait in the listening queue",
            answers,
            wanted,
            hard,
        )
    return hard
