"""A recording lists what would be launched, and launches, compiles and believes nothing."""

import functools
import importlib
import pkgutil
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import cache as triton_cache
from triton.runtime.jit import JITFunction

import tpdet.kernels.cuda
from tests.lib.kernels.driverless import Driver, compile_for_hopper
from tpdet.kernels.cuda.compile import recording as module
from tpdet.kernels.cuda.compile.pool import compile_all, watching_compilations
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands
from tpdet.kernels.cuda.gemm.variants.warp_specialised_launch import run_gluon_fold
from tpdet.kernels.cuda.sampling.noise import fixed_point


@triton.jit
def add_number(x, count, NUMBER: tl.constexpr):
    at = tl.arange(0, 32)
    tl.store(x + at, tl.load(x + at, mask=at < count, other=0) + NUMBER, mask=at < count)


@triton.jit
def refuse(x):
    tl.static_assert(False, "not for any GPU")


NUMBER = tl.constexpr(3)


@triton.jit
def numbered(value):
    return value + NUMBER


@triton.jit
def add_it(x):
    tl.store(x, numbered(tl.load(x)))


LOG2_E = tl.constexpr(3)  # not the constant of this name that `fixed_point` reads


@triton.jit
def reads_two_of_one_name(x):
    tl.store(x, fixed_point(tl.load(x), LOG2_E))


@pytest.fixture(autouse=True)
def hopper(monkeypatch, tmp_path):
    compile_for_hopper(monkeypatch, tmp_path)
    for function in (add_number, refuse):
        monkeypatch.setattr(
            function, "device_caches", type(function.device_caches)(function.create_binder)
        )


def ask(*numbers, count=32):
    x = torch.zeros(32, dtype=torch.int32)
    for number in numbers:
        add_number[1,](x, count, number)


def test_each_kind_of_arguments_is_asked_for_once():
    with recording() as asked:
        ask(1, 2, 1)
        ask(1, count=31)
        ask(1, count=30)
    assert [each.name for each in asked.values()] == ["add_number"] * 3
    with recording() as again:
        ask(2)
    assert list(again) == list(asked)[1:2]  # a digest is of what is compiled


def test_a_kernel_has_one_key_whichever_was_asked_for_first():
    with recording():
        pass
    keys = []
    for first in (numbered, add_it):
        for function in (numbered, add_it):
            function.hash, function.used_global_vals = None, {}
        keys.append(first.cache_key and add_it.cache_key)
    assert keys[0] == keys[1]


def values_of_one_name(function):
    """Names of constants that have several values in a function and in what it calls.

    Triton orders such constants by addresses, so that the function's key differs by process.
    """
    _ = function.cache_key
    values = {}
    for (name, _), (value, _) in function.used_global_vals.items():
        if isinstance(value, tl.constexpr):
            values.setdefault(name, set()).add(repr(value))
    return sorted(name for name, of_name in values.items() if len(of_name) > 1)


def test_every_process_gives_a_kernel_the_same_key():
    functions = {}
    for module_info in pkgutil.walk_packages(tpdet.kernels.cuda.__path__, "tpdet.kernels.cuda."):
        for value in vars(importlib.import_module(module_info.name)).values():
            if isinstance(value, JITFunction):
                functions[f"{value.module}.{value.__name__}"] = value
    assert len(functions) > 150
    ambiguous = {name: values_of_one_name(each) for name, each in functions.items()}
    assert not {name: names for name, names in ambiguous.items() if names}


def test_one_name_of_two_constants_is_noticed():
    assert values_of_one_name(reads_two_of_one_name) == ["LOG2_E"]


def test_what_was_asked_for_is_compiled_once_and_found_afterwards():
    names = []
    with watching_compilations(names.append):
        with recording() as asked:
            ask(1, 2)
        assert not names
        assert compile_all(asked.values(), threads=2) == []
        assert names == ["add_number"] * 2
        with recording() as again:
            ask(1, 2)
        assert not again
        compile_all(asked.values(), threads=2)
    assert names == ["add_number"] * 2  # the second time from disk


class Gpu(Driver):
    """A driver that notes what would be loaded, launched, and by which thread."""

    def __init__(self):
        self.made, self.loaded, self.launched = [], [], []
        self.thread = threading.local()
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
            load_binary=self.load,
            unload_module=lambda module: None,
        )

    def launcher_cls(self, src, metadata):
        self.made.append(src.name)
        return lambda *of: self.launched.append(of)

    def load(self, name, code, shared, device):
        self.loaded.append((name, self.current_device()))
        return "module", "function", 32, 0, 1024

    def current_device(self):
        return getattr(self.thread, "device", 0)

    def set_device(self, device):
        self.thread.device = device


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    made = Gpu()
    compile_for_hopper(monkeypatch, tmp_path, made)
    monkeypatch.setattr(torch.cuda, "current_device", made.current_device)
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    yield made
    add_number.device_caches.clear()  # kernels are unloaded by the driver that loaded them


def test_kernels_are_loaded_ahead_to_the_callers_gpu_and_then_only_launched(gpu):
    gpu.set_device(3)
    with recording() as asked:
        ask(5, 6)
    assert not gpu.made and not gpu.loaded
    assert compile_all(asked.values(), threads=2) == []
    assert gpu.made == ["add_number"] * 2 and gpu.loaded == [("add_number", 3)] * 2
    ask(5, 6, 5)
    assert len(gpu.launched) == 3 and len(gpu.made) == len(gpu.loaded) == 2


def test_triton_is_hashed_once_for_all_threads(monkeypatch):
    threads, found = [], triton_cache.triton_key()

    @functools.lru_cache
    def triton_key():
        threads.append(threading.get_ident())
        return found

    monkeypatch.setattr(triton_cache, "triton_key", triton_key)
    with recording() as asked:
        ask(*range(8))
    assert compile_all(asked.values(), threads=8) == [] and len(threads) == 1


def test_a_compiled_kernel_is_not_launched_either():
    with recording() as asked:
        ask(1)
    compile_all(asked.values(), threads=1)
    with recording():
        ask(1)
    with pytest.raises(AttributeError):  # the driver without a GPU has nothing to launch by
        ask(1)


def test_other_threads_compile_and_launch_as_ever():
    errors = []

    def launch():
        try:
            ask(3)
        except AttributeError as error:
            errors.append(error)

    names = []
    with recording() as asked, watching_compilations(names.append):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert not asked and names == ["add_number"] and len(errors) == 1


def test_other_threads_launch_also_what_the_recording_asked_for(gpu):
    names = []
    with recording() as asked, watching_compilations(names.append):
        ask(3, 4)
        thread = threading.Thread(target=ask, args=(3, 3))
        thread.start()
        thread.join()
        ask(3, 4)
    assert len(asked) == 2 and names == ["add_number"] and len(gpu.launched) == 2
    ask(3, 4)
    assert len(gpu.launched) == 4


def test_a_kernel_of_gluon_is_recorded():
    x, w = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(2, 128, 256, dtype=torch.bfloat16)
    y = torch.empty(1, 1, 128)
    with recording() as asked:
        tile = Tile(128, 128, 64, 4, 6, "descriptor")
        run_gluon_fold(Operands(x, w, None, y), RootForm(1, 2, 1, 1), tile, 8)
    assert [each.name for each in asked.values()] == ["warp_specialised_fold"]


def test_memory_that_no_kernel_wrote_is_zero():
    held = torch.ones(5, dtype=torch.int64)
    with recording():
        for made in (
            torch.empty(1000, dtype=torch.int64),
            torch.empty_like(held),
            held.new_empty(3),
            torch.empty(2, dtype=torch.bool),
        ):
            assert not made.any()
    assert held.all()


def test_a_kernel_that_cannot_be_compiled_is_named_and_keeps_no_other_from_it():
    with recording() as asked:
        ask(4)
        refuse[1,](torch.zeros(1))
    (said,) = compile_all(asked.values(), threads=2)
    assert said.startswith("refuse: ") and "not for any GPU" in said
    with recording() as again:
        ask(4)
    assert not again


def test_a_recording_that_fails_leaves_triton_as_it_was():
    before = JITFunction.run, JITFunction._do_compile
    with pytest.raises(ZeroDivisionError), recording():
        ask(5 // 0)
    assert (JITFunction.run, JITFunction._do_compile) == before
    with pytest.raises(AttributeError):
        ask(5)


def test_a_triton_of_another_shape_is_refused(monkeypatch):
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, source: None)
    with pytest.raises(RuntimeError, match=r"JITFunction._do_compile takes \('self', 'key', 'sour"):
        module.check_triton()
