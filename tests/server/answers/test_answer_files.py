"""Files of cached answers: whole or absent, and the least recently used leave first."""

import os
import subprocess
import sys

import pytest

from tests.lib.tree import ROOT
from tpdet.errors import NotPermittedError
from tpdet.server.answers.files import AnswerFiles, AnswerName, erase_answers
from tpdet.server.front.tally import SharedTally, new_tallies

CONTENT = b'{"some":"answer"}' + b" " * 900  # with its checksum under 1,000 bytes


def name(number, salt="", owner=""):
    return AnswerName(f"{number:064x}", salt, owner)


def test_the_least_recently_used_leave_at_the_limit(tmp_path, monkeypatch):
    clock = iter(range(10**18, 10**18 + 1000))
    monkeypatch.setattr("tpdet.server.answers.files.time.time_ns", lambda: next(clock))
    files = AnswerFiles(tmp_path, 3500, SharedTally.alone())
    for number in (1, 2, 3):
        files.write(name(number), CONTENT)
    assert files.read(name(1)) == CONTENT  # now 2 was used longest ago
    files.write(name(3), b"other")  # it is there: used, not written
    files.write(name(4), CONTENT)
    there = [number for number in (1, 2, 3, 4) if files.read(name(number))]
    assert there == [1, 3, 4] and files.read(name(3)) == CONTENT
    files.write(name(5), b"x" * 3600)  # more than all may be
    assert [number for number in (1, 3, 4, 5) if files.read(name(number))] == [1, 3, 4]


def test_bytes_are_counted_by_all_processes_together(tmp_path):
    descriptor = new_tallies(2)
    tallies = [SharedTally(descriptor, index) for index in (0, 1)]
    os.close(descriptor)
    one, other = (AnswerFiles(tmp_path, 10_000, tally) for tally in tallies)

    def counted():
        return tallies[0].total("answer_cache_bytes")

    def real():
        return sum(path.stat().st_size for path in tmp_path.glob("*/*"))

    one.write(name(1), CONTENT)
    other.write(name(2), CONTENT)
    assert counted() == real() > 1800
    one.remove(name(2))
    assert other.read(name(2)) is None and counted() == real()
    next(tmp_path.glob("*/*")).write_bytes(b"damage" * 50)
    one.tidy()
    assert counted() == real() == 300
    assert other.read(name(1)) is None
    assert counted() == real() == 0


def test_names_differ_by_each_part_and_erasure_finds_them_all(tmp_path):
    files = AnswerFiles(tmp_path, 10_000, SharedTally.alone())
    names = [name(7), name(7, "a"), name(7, "", "a"), name(7, "a", "a"), name(7, "\ud800"), name(8)]
    for place, one in enumerate(names):
        files.write(one, b"%d" % place)
    assert [files.read(one) for one in names] == [b"%d" % place for place in range(len(names))]
    assert erase_answers(tmp_path, name(7).request_digest) == 5
    assert [files.read(one) for one in names] == [None] * 5 + [b"5"]


def test_a_process_that_is_killed_while_it_writes_leaves_no_answer(tmp_path):
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tpdet.server.answers.files import AnswerFiles, AnswerName\n"
        "from tpdet.server.front.tally import SharedTally\n"
        "files = AnswerFiles(Path(sys.argv[1]), 10**6, SharedTally.alone())\n"
        "os.replace = lambda *paths: os.kill(os.getpid(), 9)\n"
        "files.write(AnswerName('ab' * 32, '', ''), b'x' * 1000)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    assert ended.returncode == -9
    (left,) = tmp_path.glob("*/*")
    assert left.name.startswith(".new-")
    files = AnswerFiles(tmp_path, 10**6, SharedTally.alone())
    assert files.read(AnswerName("ab" * 32, "", "")) is None
    files.tidy(unfinished=True)
    assert not [*tmp_path.glob("*/*")]


def test_a_full_disk_is_no_fault_of_a_request_and_is_said_once(tmp_path, monkeypatch, caplog):
    def full(*paths):
        raise OSError(28, "No space left on device")

    tally = SharedTally.alone()
    files = AnswerFiles(tmp_path, 10_000, tally)
    with monkeypatch.context() as patched:
        patched.setattr("tpdet.server.answers.files.os.replace", full)
        files.write(name(1), CONTENT)
        files.write(name(2), CONTENT)
    assert not [*tmp_path.glob("*/*")] and tally.total("answer_cache_bytes") == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert "--answer-cache: answers cannot be kept" in line and "No space left" in line
    files.write(name(1), CONTENT)
    assert files.read(name(1)) == CONTENT


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotPermittedError, match=r"--answer-cache .* cannot be written"):
            AnswerFiles(directory, 1000, SharedTally.alone())
