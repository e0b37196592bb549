"""Starts a program with the stop signals blocked: `python -m tpdet.launch.life.shield PROGRAM ...`.

Open MPI's daemons on other nodes run in a Slurm step, and Slurm sends a cancelled job's SIGTERM to
every process of the step. A daemon that gets it kills its ranks, which should drain instead.
Blocked signals stay blocked over exec; the daemons unblock them for the ranks.
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
