"""Processes with a locked cache compile a kernel once, and wait for none that will not come."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompilationError

from tests.gpu.lib import locked_cache
from tests.gpu.lib.locked_cache import LockedCache
from tests.gpu.lib.suite import Check, side_by_side
from tests.lib.forked import forking
from tests.lib.kernels.driverless import compile_for_hopper
from tpdet.kernels.cuda.compile.pool import hash_triton, watching_compilations


@triton.jit
def add_up(x, ROUNDS: tl.constexpr):
    total = tl.load(x)
    for i in tl.static_range(ROUNDS):
        total = total * 3 + tl.load(x + i)
    tl.store(x, total)


@triton.jit
def refuse(x):
    tl.static_assert(False, "not for any GPU")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder of an empty cache, which this process locks."""
    compile_for_hopper(monkeypatch, tmp_path)
    monkeypatch.setattr(knobs.cache, "manager_class", LockedCache)
    return tmp_path


def compile_with_others(cache, processes):
    """Compile one kernel when as many processes are about to; how many this one compiled."""
    compile_for_hopper(pytest.MonkeyPatch(), cache)
    hash_triton()
    (cache / f"{os.getpid()}.ready").touch()
    while len(list(cache.glob("*.ready"))) < processes:
        time.sleep(0.001)
    compiled = []
    with watching_compilations(compiled.append):
        add_up.warmup(torch.int32, ROUNDS=100, grid=(1,))
    return {"compiled": len(compiled)}


def lock_and_die(cache):
    compile_for_hopper(pytest.MonkeyPatch(), cache)
    lock = LockedCache("KERNEL")
    os._exit(3 if lock.get_group("kernel.json") is None else 4)


def rows_of(checks):
    forking()  # whose processes other tests fork as well
    with ThreadPoolExecutor(len(checks)) as threads:
        return [row.result() for row in side_by_side(checks, threads)]


def test_checks_that_run_at_once_compile_a_kernel_once(cache):
    rows = rows_of([Check(str(i), compile_with_others, (cache, 2)) for i in range(2)])
    assert all(row["equal"] for row in rows), rows
    assert sorted(row["compiled"] for row in rows) == [0, 1]


def test_who_waits_is_given_what_another_wrote(cache):
    first, second, groups = LockedCache("KERNEL"), LockedCache("KERNEL"), []
    assert first.get_group("kernel.json") is None and first.get_file("kernel.so") is None
    waiting = threading.Thread(target=lambda: groups.append(second.get_group("kernel.json")))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    group = {"kernel.json": first.put("{}", "kernel.json")}
    first.put_group("kernel.json", group)
    waiting.join(10)
    assert groups == [group]


def test_a_kernel_that_others_take_too_long_for_is_compiled_here(cache, monkeypatch):
    monkeypatch.setattr(locked_cache, "LONGEST_WAIT", 0.1)
    first = LockedCache("KERNEL")
    assert first.get_group("kernel.json") is None
    assert LockedCache("KERNEL").get_group("kernel.json") is None


def test_a_compilation_that_raises_keeps_no_other_waiting(cache):
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(CompilationError):
            refuse.warmup(torch.int32, grid=(1,))
    assert time.monotonic() - began < locked_cache.LONGEST_WAIT / 2


def test_a_check_that_dies_while_it_compiles_is_reported_and_keeps_no_other_waiting(cache):
    (row,) = rows_of([Check("dies", lock_and_die, (cache,))])
    assert row == {"case": "dies", "equal": False, "error": "the process died"}
    began = time.monotonic()
    assert LockedCache("KERNEL").get_group("kernel.json") is None
    assert time.monotonic() - began < locked_cache.LONGEST_WAIT / 2
