"""Becomes a command, on some cores, that the kernel stops when its parent is killed.

    python child.py CORE,CORE,... COMMAND...

A file to run, by itself: what must happen between a fork and a program is unsafe to do in a parent
that has threads. `-` keeps the parent's cores.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(cores: str, *command: str) -> None:
    parent = os.getppid()
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was killed before it was watched
        sys.exit(f"the sweep that started {command[0]} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
