"""The merge of splits, a Gluon kernel, beside Triton's interpreter: its source, run on torch."""

from types import FunctionType, SimpleNamespace

import torch

from tests.kernels.interpreted.emulated.warps import Machine, Pointer, Shared, language
from tpdet.kernels.cuda.attention import merge_splits as attention_merge_splits


def names_of(program):
    """What the kernel knows `gl` and `tl` as, for one program."""
    gl = language(Machine(), program, 0)
    tl = SimpleNamespace(**vars(gl), debug_barrier=lambda: None)
    lines = lambda shared, dtype, shape, _: Shared(shared.tensor.view(dtype).view(shape))
    return {"gl": gl, "tl": tl, "as_lines": lines}


def emulated(function, names, spaces=None):
    """The Python function of a kernel, and of all that it calls, over other names."""
    own, spaces = function.fn.__globals__, {} if spaces is None else spaces
    if id(own) not in spaces:
        space = spaces[id(own)] = dict(own)
        for name, value in own.items():
            if hasattr(value, "fn"):
                space[name] = emulated(value, names, spaces)
            elif type(value).__name__ == "constexpr":
                space[name] = value.value
        space.update(names)
    return FunctionType(function.fn.__code__, spaces[id(own)])


def pointed(value):
    """An argument with a `Pointer` for each tensor, in a record too."""
    if isinstance(value, tuple):
        return value._make(map(pointed, value))
    return Pointer(value) if isinstance(value, torch.Tensor) else value


class EmulatedLaunch:
    """`merge_splits[grid](...)`, program after program."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, enable_fp_fusion, **constants):
            assert num_warps == 4 and not enable_fp_fusion
            pointers = [pointed(x) for x in arguments]
            for program in range(grid[0]):
                emulated(attention_merge_splits.merge_splits, names_of(program))(
                    *pointers, **constants
                )

        return launch
