"""Starts a program that dies with its parent: ``python -m tplr.localnet.launch PARENT_PID PROGRAM ARGUMENT...``.

Linux kills the program when the parent ends, even by SIGKILL; on other systems it keeps running. The launcher is a
separate program because code between fork and exec can hang in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives exec


def main() -> None:
    """Replace this process by the program."""
    parent, *command = sys.argv[1:]
    die_with(int(parent))
    os.execv(command[0], command)  # noqa: S606 - our own command line


def die_with(parent: int) -> None:
    """Let Linux kill this process when its parent ``parent`` ends; exit now if the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("launch: the parent process has ended")


if __name__ == "__main__":
    main()
