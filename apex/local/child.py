"""Becomes a supervised child: `python -I -S child.py PARENT SIGNAL USER PROGRAM ARGUMENT...`

Between fork and exec there is no safe place for Python code in a process with threads, so this small
program takes that place: it gives up root where asked, has the kernel send SIGNAL when the parent
thread is gone (also after `kill -9` of the supervisor), and then becomes PROGRAM. Standard library only.
"""

import ctypes
import os
import pwd
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, death_signal, user, *argv = sys.argv[1:]
    if user:
        account = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    # Only now: the kernel forgets the death signal when the identity changes.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the supervisor ended before its child began")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"cannot run {argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
