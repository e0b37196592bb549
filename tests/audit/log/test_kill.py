"""A writer that is killed at a random moment: what it had been promised is in the log."""

import random
import signal
import subprocess
import sys
import time

import pytest

from tests.audit.log.audit_logs import open_log, read_log
from tests.lib.tree import ROOT

WRITER = """
import os, sys, threading
from pathlib import Path
from tests.audit.log.audit_logs import open_log

log = open_log(Path(sys.argv[1]), publish_seconds=0.005)
free = threading.Semaphore(32)
os.write(1, b"open\\n")

def promise(leaf):
    def tell(future):
        os.write(1, b"%d %s\\n" % (future.result(), leaf))
        free.release()
    return tell

for number in range(100_000):
    free.acquire()
    leaf = b"%s.%d" % (sys.argv[2].encode(), number)
    log.append(leaf).add_done_callback(promise(leaf))
"""


@pytest.mark.parametrize("rounds", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_writer_keeps_its_promises(tmp_path, rounds):
    draw = random.Random(rounds)
    directory, earlier, promised = tmp_path / "log", [], {}
    for number in range(rounds):
        command = [sys.executable, "-c", WRITER, directory, str(number)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        with process:
            assert process.stdout.readline() == b"open\n"
            lines = [process.stdout.readline() for _ in range(draw.randrange(300))]
            time.sleep(draw.random() / 100)  # to end in the middle of something
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                index, leaf = line.split()
                promised[int(index)] = leaf
        reader = read_log(directory)
        reader.verify(earlier)
        earlier = [reader.checkpoint]
        leaves = [*reader.leaves()]
        assert all(leaves[index] == leaf for index, leaf in promised.items())
        assert len({*leaves}) == len(leaves)
    assert promised
    open_log(directory).close()
    read_log(directory).verify(earlier)
