"""Processes that help to compile: the same files as without them, and no harm where they fail."""

import gc
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.compiled.test_recording import add_number
from tests.lib.kernels.driverless import compile_for_hopper
from tpdet.kernels.cuda.compile import helpers, pool
from tpdet.kernels.cuda.compile.cache import looking_up, missing_key
from tpdet.kernels.cuda.compile.helpers import Helpers
from tpdet.kernels.cuda.compile.plain_form import from_plain, to_plain
from tpdet.kernels.cuda.compile.pool import compile_all
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.pointwise.fold import fold_planes
from tpdet.kernels.fold_program import FoldProgram
from tpdet.launch.host.processes import children_of

PROGRAM = FoldProgram((0, 1), (0, 1), (0, 1), (-1, 0))
BLOCKS = 32, 64, 128, 256
BEFORE = set()
"""Children that an earlier test left to this process, such as multiprocessing's tracker."""


@pytest.fixture(autouse=True)
def _children_before():
    BEFORE.clear()
    BEFORE.update(child.pid for child in children_of(os.getpid()))


def started_since():
    return [child for child in children_of(os.getpid()) if child.pid not in BEFORE]


READY = "echo '[0, \"\"]'"


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Four kernels that this process has not compiled yet; few are many here."""
    compile_for_hopper(monkeypatch, tmp_path / "triton")
    monkeypatch.setattr(pool, "FEW", 0)
    caches = type(fold_planes.device_caches)(fold_planes.create_binder)
    monkeypatch.setattr(fold_planes, "device_caches", caches)
    x = torch.zeros(2, 512)
    with recording() as asked:
        for block in BLOCKS:
            fold_planes[1,](x, x, 512, PROGRAM=PROGRAM, BLOCK=block, DEPENDENT=False)
    return list(asked.values())


def keys(kernels):
    with looking_up():
        return [missing_key(each) for each in kernels]


def compiled_files(folder):
    """What a start reads of a cache: its code and descriptions, by name."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in (".cubin", ".json") and not path.name.startswith("__grp__")
    }


@pytest.fixture
def python(monkeypatch, tmp_path):
    """Lets a program of the shell stand for a helper; where it writes that it was started."""

    def take(script):
        program, started = tmp_path / "python", tmp_path / "started"
        program.write_text(f"#!/bin/sh\necho x >> {started}\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return started

    return take


def test_helpers_write_the_files_that_one_process_writes(kernels, tmp_path, monkeypatch):
    wanted = keys(kernels)
    assert compile_all(kernels, 1) == [] and keys(kernels) == [None] * 4
    alone = compiled_files(tmp_path / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "helped"))
    assert keys(kernels) == wanted
    others, done = threading.Event(), []

    def compile_here(each):
        """Hold one kernel back until a helper has compiled the others."""
        assert others.wait(60)

    def each_done(each):
        done.append(each)
        if len(done) == 3:
            others.set()

    crew = Helpers(1, 1)
    crew.compile(list(zip(kernels, wanted, strict=True)), compile_here, each_done, 1)
    assert crew.problems == [] and len(done) == 4
    assert keys(kernels) == [wanted[0], None, None, None]  # the first one was taken here
    assert compile_all(kernels, 1, helpers=crew) == []
    assert compiled_files(tmp_path / "helped") == alone
    assert {path.stat().st_uid for path in (tmp_path / "helped").rglob("*")} == {os.geteuid()}
    crew.close()
    assert not started_since()


def test_a_helper_compiles_no_other_kernel_and_ends_with_its_input(kernels, tmp_path):
    job = json.dumps([7, "ANOTHER", to_plain(kernels[0])]).encode() + b"\n"
    command = [sys.executable, "-m", "tpdet.kernels.cuda.compile.helper_process", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as helper:
        helper.stdin.write(job)
        helper.stdin.flush()
        said = [json.loads(helper.stdout.readline()) for _ in range(2)]
        helper.stdin.close()
        assert helper.wait(30) == 0 and helper.stdout.read() == b""
    assert said == [[0, ""], [7, "fold_planes has another key here"]]
    assert not compiled_files(tmp_path / "triton")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 3", "a helper ended with code 3"),
        (f"{READY}; read line; kill -9 $$", "a helper ended with code -9"),
        (f"{READY}; cat > /dev/null", "a helper answered nothing for 1 s"),
        ("cat > /dev/null", None),
        (f"{READY}; read line; echo '[1, \"no\"]'; cat > /dev/null", "no"),
        (f"{READY}; read line; echo '[1, \"\"]'; exit 0", "a helper ended with code 0"),
        ("echo nonsense", "a helper answered b'nonsense\\n'"),
    ],
    ids=["ends", "is killed", "hangs", "is never ready", "refuses", "lies", "talks"],
)
def test_a_helper_that_fails_costs_time_only(kernels, python, monkeypatch, script, problem):
    started = python(script)
    monkeypatch.setattr(helpers, "PATIENCE", 1.0)
    crew, tried, count = Helpers(1, 1), [], []

    def compile_here(each):
        """Compile nothing before the helper has failed."""
        tried.append(each)
        deadline = time.monotonic() + 30
        while problem is not None and not crew.problems and time.monotonic() < deadline:
            time.sleep(0.01)

    crew.compile(list(zip(kernels, keys(kernels), strict=True)), compile_here, count.append, 2)
    assert crew.problems == ([] if problem is None else [problem]) and set(tried) <= set(count)
    assert compile_all(kernels, 2, lambda: count.append(1), crew) == []
    assert keys(kernels) == [None] * 4 and count.count(1) == 4
    assert started.read_text() == "x\n"
    crew.close()
    assert not started_since()


def test_no_process_can_be_started(kernels, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    crew = Helpers(2, 1)
    assert compile_all(kernels, 2, helpers=crew) == [] and keys(kernels) == [None] * 4
    assert crew.problems == ["no process could be started (No such file or directory)"]


def test_helpers_that_nobody_closes_end_where_a_start_is_given_up(python):
    python("exec cat > /dev/null")
    crew = Helpers(2, 1)
    crew.start()
    assert len(started_since()) == 2
    del crew
    gc.collect()
    assert not started_since()


def test_nobody_is_started_for_few_kernels_or_for_those_on_disk(kernels, python, monkeypatch):
    started = python("exit 3")
    monkeypatch.setattr(pool, "FEW", 4)
    crew = Helpers(2, 1)
    assert compile_all(kernels, 2, helpers=crew) == [] and keys(kernels) == [None] * 4
    monkeypatch.setattr(pool, "FEW", 0)
    count = []
    assert compile_all(kernels, 2, lambda: count.append(1), crew) == []
    assert len(count) == 4 and not started.exists() and crew.problems == []


def test_what_is_no_plain_data_is_compiled_here(kernels, monkeypatch, python):
    python("exit 3")
    caches = type(add_number.device_caches)(add_number.create_binder)
    monkeypatch.setattr(add_number, "device_caches", caches)
    with recording() as asked:
        add_number[1,](torch.zeros(32, dtype=torch.int32), 32, 5)
    (of_a_test,) = asked.values()
    with pytest.raises(TypeError, match="cannot be found by its name"):
        to_plain(of_a_test)
    crew = Helpers(1, 1)
    assert compile_all([of_a_test], 1, helpers=crew) == [] and keys([of_a_test]) == [None]
    assert "add_number is compiled by no helper" in crew.problems[0]


@pytest.mark.parametrize(
    "plain",
    [
        ["os", "system"],
        ["tests.kernels.compiled.test_recording", "add_number"],
        ["tpdet.kernels.cuda.compile.helpers", "os"],
        ["tpdet.kernels.cuda.pointwise.fold", "no_such_kernel"],
    ],
)
def test_only_kernels_of_the_package_are_looked_up(kernels, plain):
    good = json.loads(json.dumps(to_plain(kernels[0])))
    assert from_plain(good).function is fold_planes
    with pytest.raises((ValueError, AttributeError)):
        from_plain([good[0], plain, *good[2:]])
