"""A rank without a model, for tests/launch/test_supervise.py: registers, waits, ends as told.

Each rank does what a real one does at these points: PDEATHSIG, run directory, stop signals, peers
checked first, rank 0 alone decides a drain.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tpdet.errors import CheckpointError, DrainTimeoutError, PeerLostError
from tpdet.launch.host.processes import die_with_parent
from tpdet.launch.life.lifecycle import check_peers, end_process
from tpdet.launch.life.run_directory import RunDirectory, open_run_directory
from tpdet.launch.life.signals import StopSignals
from tpdet.launch.ranks.environment import read_environment


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--case", default="serve")
    arguments = parser.parse_args()
    if arguments.case == "early":
        return 3
    if arguments.case == "slow start":
        time.sleep(60)
    environment = read_environment()
    die_with_parent()
    run = open_run_directory(arguments.run_dir, environment)
    signals = StopSignals()
    signals.install()
    if environment.rank == 0 and arguments.case == "child":
        child = subprocess.Popen(["sleep", "600"])
        (run.path / "child").write_text(str(child.pid))
    run.register(environment.rank, "cpu")
    try:
        return live(run, environment.rank, environment.size, arguments.case, signals)
    except Exception as error:

        def before_exit() -> None:
            (run.path / f"clients told by {environment.rank}").touch()
            raise ValueError("ignored: the end goes on")

        end_process(run, environment.rank, error, before_exit)


def live(run: RunDirectory, rank: int, size: int, case: str, signals: StopSignals) -> int:
    while len(run.records()) < size:
        time.sleep(0.01)
    if case == "refuse" and rank == size - 1:
        raise CheckpointError("model.safetensors is truncated")
    if case == "crash" and rank == 0:
        raise RuntimeError("a mistake of ours")
    if case == "silent" and rank == 0:
        os._exit(9)
    if case == "done":
        if rank == 0:
            run.decide_exit(0, "drained", 0)
        return 0
    if rank == 0:
        run.write_ready({"tp": size})
    if case == "blocked" and rank == 0:
        # As inside a collective: only the watching thread can act.
        signals.watch(lambda number: run.decide_exit(0, "drained", 0) and os._exit(0))
        threading.Event().wait()
    while True:
        if signals.wait(0.1):
            check_peers(run, rank)
            if case == "deaf" and rank == 0:
                continue
            if case == "late" and rank == 0:
                raise DrainTimeoutError("1 request still ran")
            if rank == 0:
                run.decide_exit(0, "drained", 0)
        if case == "watchful":
            check_peers(run, rank)
        decision = run.exit_decision()
        if decision is not None and decision.exit == 0:
            return 0
        if not run.current:
            raise PeerLostError("another server has the run directory")


if __name__ == "__main__":
    sys.exit(main())
