"""No memory, disk, threads or files: told from mistakes by class or words, with what to raise."""

import errno

import pytest

from tests.launch.test_standard_streams import run
from tpdet.errors import CheckpointError, ResourceError
from tpdet.launch.host.resources import resource_error
from tpdet.launch.life.lifecycle import exit_of


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "memory for this process ran out: raise its limit"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "map segment"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 5"), "you tried 5"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory for this process ran out"),
        (RuntimeError("can't start new thread"), "no more threads can be started"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "ulimit -n"),
        (OSError(errno.ENOSPC, "No space", "/d/x"), "/d/x cannot be written"),
        (OSError(errno.EFBIG, "too large", "/d/from", None, "/d/to"), "/d/to cannot be written"),
        (OSError(errno.EFBIG, "too large"), "ulimit -f"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/t']"), "set TMPDIR"),
    ],
)
def test_what_means_no_room_is_71_with_the_remedy(error, said):
    found = resource_error(error)
    assert isinstance(found, ResourceError) and said in str(found)
    assert exit_of(error) == (71, "no_resource")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a mistake"), ImportError("No module named 'x'"), KeyError("memory"),
        FileNotFoundError(2, "No such file"), CheckpointError("no memory"), OSError(5, "I/O"),
        BlockingIOError(errno.EAGAIN, "a socket", "name"),
    ],
)  # fmt: skip
def test_other_errors_stay_what_they_are(error):
    assert resource_error(error) is None
    assert exit_of(error)[0] != 71


def test_a_command_without_memory_is_one_line():
    done = run("raise MemoryError")
    assert done.returncode == 71
    assert done.stderr.startswith(b"tpdet: memory for this process ran out") and (
        done.stderr.count(b"\n") == 1
    )


def test_a_command_whose_own_file_has_no_room_names_it():
    done = run("raise OSError(28, 'No space left on device', '/d/out')")
    assert done.returncode == 71 and b"tpdet: /d/out cannot be written (No space" in done.stderr
