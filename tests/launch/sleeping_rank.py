"""A process that stands for a rank without being one."""

import json
import subprocess
import time
from contextlib import contextmanager

from tpdet.launch.host.processes import process_status


@contextmanager
def sleeping():
    """A process that sleeps; it is ended at last."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition, seconds=30.0):
    """Until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def record_as(run, rank, process):
    """Register another process as a rank; returns its start time."""
    run.register(rank, "cpu")
    file = run.path / "ranks" / f"{rank}.json"
    start_time = process_status(process.pid).start_time
    content = {**json.loads(file.read_text()), "pid": process.pid, "start_time": start_time}
    file.write_text(json.dumps(content))
    return start_time
