"""Starts a program with the stop signals blocked: `python -m tpdet.launch.life.shield PROGRAM ...`.

Open MPI's daemons on other nodes are a step of Slurm's, which sends a cancelled job's SIGTERM to
every process of it. A daemon that heard it would kill its ranks, which are to drain; blocked
signals stay blocked over exec, and daemons reset them for the ranks.
"""

import os
import signal
import sys

from tpdet.launch.life.signals import STOP_SIGNALS


def main(command: list[str]) -> None:
    """Become `command`, which is looked for on the PATH. Raises OSError if it is not there."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
