"""What the audit log costs: `python scripts/audit_log_times.py [DIRECTORY] [--results FOLDER]`.

One writer appends leaves of 2,000 bytes, each when its last one is durable, in turns with one sync
of as many bytes at the end of a file of the same directory. Then many writers append at once, as
the tasks of a server do: how many of them share a sync, and how much of a processor each costs.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

from tpdet.audit.log.checkpoint import NoteKey  # noqa: E402
from tpdet.audit.log.disk import Disk  # noqa: E402
from tpdet.audit.log.reader import LogReader  # noqa: E402
from tpdet.audit.log.writer import AuditLog  # noqa: E402
from tpdet.tools.measurement.results_file import append_run  # noqa: E402
from tpdet.tools.worlds.machine import Machine  # noqa: E402

WRITERS = (16, 64, 256)
LEAF = bytes(2000)
TURNS, APPENDS = 300, 50  # of one writer; of each of many
NAME = "example.com/times"


class CountedDisk(Disk):
    """Counts the syncs that appends wait for."""

    syncs = 0

    def sync(self, descriptor):
        """Count one of the committing thread's."""
        self.syncs += threading.current_thread().name == "audit-commit"
        super().sync(descriptor)


def rows_of_one_writer(log, path):
    """An append's time beside a sync's."""
    appends, syncs = [], []
    with path.open("wb", buffering=0) as file:
        for _ in range(TURNS):
            begin = time.perf_counter()
            file.write(LEAF)
            os.fdatasync(file.fileno())
            middle = time.perf_counter()
            log.append(LEAF).result()
            appends.append(time.perf_counter() - middle)
            syncs.append(middle - begin)
    for name, part in ("median", 0.5), ("P90", 0.9):
        value, peer = (round(sorted(v)[int(TURNS * part)] * 1e3, 3) for v in (appends, syncs))
        yield {
            "case": f"append until durable, {name}", "batch": 1, "value": value, "unit": "ms",
            "peer": "one sync", "peer_value": peer, "ratio": round(value / peer, 2),
        }  # fmt: skip


async def append_often(log, writers):
    """Appends by so many tasks."""

    async def append():
        for _ in range(APPENDS):
            await asyncio.wrap_future(log.append(LEAF))

    await asyncio.gather(*(append() for _ in range(writers)))


def rows_of_many_writers(log, disk, writers):
    """What appends share and cost."""
    syncs, processor, begin = disk.syncs, time.process_time(), time.perf_counter()
    asyncio.run(append_often(log, writers))
    seconds, count = time.perf_counter() - begin, writers * APPENDS
    cost = (time.process_time() - processor) / count * 1e6
    for case, value, unit in (
        ("appends", count / seconds, "1/s"),
        ("appends a sync", count / (disk.syncs - syncs), "appends"),
        ("processor time of an append", cost, "us"),
    ):
        yield {"case": case, "batch": writers, "value": round(value, 1), "unit": unit}


def rows_of_a_check(directory, public):
    """How fast a log is verified."""
    processor = time.process_time()
    reader = LogReader(directory, [NoteKey(NAME, public)])
    reader.verify()
    cost = (time.process_time() - processor) / reader.checkpoint.size * 1e6
    yield {"case": "processor time of a leaf verified", "batch": 1, "value": round(cost, 1),
           "unit": "us"}  # fmt: skip


def measure(directory):
    """Rows of a results file."""
    secret, disk = Ed25519PrivateKey.generate(), CountedDisk()
    public = secret.public_key().public_bytes_raw()
    log = AuditLog(directory / "log", secret.sign, NAME, NAME, public, disk=disk)
    yield from rows_of_one_writer(log, directory / "bare")
    for writers in WRITERS:
        yield from rows_of_many_writers(log, disk, writers)
    log.close()
    yield from rows_of_a_check(directory / "log", public)


def main():
    """Measure, print, and append the run to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--results", type=Path, help="a folder of results files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rows = [*measure(Path(directory))]
    print(*rows, sep="\n")
    if options.results is not None:
        command = "scripts/audit_log_times.py"
        append_run(options.results, "audit_log", Machine(), command, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
