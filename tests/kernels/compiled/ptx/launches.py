"""Launches of Triton kernels on CPU tensors go to a `Machine`, compiled for Hopper as on a GPU.

with launching_on(machine, rank): exchange.fold_and_norm(sums, finish)
machine.finish()                      # what the tensors hold before it is garbage
"""

from contextlib import contextmanager

import pytest
import torch
import triton
from triton.compiler.compiler import CompiledKernel

from tests.kernels.compiled.hopper_kernels import hopper_ptx
from tests.kernels.compiled.ptx.memory import PLAIN
from tests.kernels.compiled.ptx.translation import translated
from tests.lib.kernels.driverless import compile_for_hopper
from tests.lib.kernels.symbolic_launches import compiled_as
from tpdet.kernels.cuda import hardware

_target = []  # the machine, the rank and the change of PTX that launches go to
_made = {}  # kernels by what Triton compiles them from


class HopperLaunch(CompiledKernel):
    """Stands for a compiled kernel; a launch puts it into the stream of a rank."""

    def __init__(self, function, signature, made):
        self.function, self.packed_metadata, self.module = function, (4, 1, 0), None
        self.signature, self.made, self._run = signature, made, self._launch

    def _launch(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        machine, rank, change = _target[-1]
        run, values = translated(change(self.made.ptx)), []
        for name, value in zip(self.function.arg_names, arguments, strict=True):
            values += _flat(self.signature[name], value)
        machine.kept.append(values)
        bits = [_bits(machine, rank, value, self.function.fn.__name__) for value in values]
        names = [name for name, _ in run.parameters]
        parameters = dict(zip(names, bits, strict=False))
        shared = max(self.made.shared, 16)
        machine.launch(rank, run, (x, y, z), parameters, "griddepcontrol" in self.made.ptx, shared)

    def launch_metadata(self, *_):
        return None


def _flat(kind, value):
    """The arguments that a kernel gets at run time."""
    if kind == "constexpr":
        return []
    if isinstance(value, tuple):
        return [each for one, it in zip(kind, value, strict=True) for each in _flat(one, it)]
    return [value]


def _bits(machine, rank, value, name):
    if not isinstance(value, torch.Tensor):
        return int(value)
    storage = value.untyped_storage()
    machine.memory.add(storage.data_ptr(), storage.nbytes(), PLAIN, rank, f"memory of {name}")
    return value.data_ptr()


@contextmanager
def compiled_for_hopper():
    """Within, Triton's launches compile for Hopper and need a `launching_on`."""

    def made(function, signature, constexprs, options, attrs):
        source = function.ASTSource(function, signature, constexprs, attrs)
        said = source.hash(), str(options)
        if said not in _made:
            _made[said] = hopper_ptx(source, vars(options))
        return HopperLaunch(function, signature, _made[said])

    with pytest.MonkeyPatch.context() as patch, compiled_as(made):
        compile_for_hopper(patch, triton.knobs.cache.dir)
        patch.setattr(hardware, "gpu_of", lambda device: hardware.H200)
        yield


@contextmanager
def launching_on(machine, rank, change=lambda ptx: ptx):
    """Within, launches go to the stream of a rank; `change`: of a kernel's PTX."""
    _target.append((machine, rank, change))
    try:
        yield
    finally:
        _target.pop()
