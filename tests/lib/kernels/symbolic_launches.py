"""GPU kernels on a machine without one: a launch computes no number, but says what made a value.

What a launch writes is named by its kernel, its numbers and the names of what it reads, so that two
runs with equal names in the end computed the same from the same, wherever their memory lay.
"""

from contextlib import contextmanager

import pytest
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tpdet.kernels.cuda.linear.gates import RowFactors
from tpdet.kernels.cuda.linear.tables import ChunkScratch, DecodeScratch
from tpdet.kernels.inputs.linear_state import LinearState

_STATE = {f"state.{part}" for part in LinearState._fields}
WRITTEN = {
    "finish_sums": {"stream.h", "y"},
    "rotate_and_store_heads": {"out", "pages.0", "pages.1"},
    "attend_splits": {"operands.out", "states.largest", "states.mass", "states.total"},
    "attend_streamed": {"operands.out", "states.largest", "states.mass", "states.total"},
    "merge_splits": {"out"},
    "gate_rows": {"ids", "weights", "positions", "expert_ids"},
    "sort_few": {"counts", "first_blocks", "positions", "expert_ids"},
    "lane_sums": {"sums"},
    "lane_sums_with_shared": {"sums"},
    "stream_lanes": {"sums"},
    "copy_from_blocks": {"x"},
    "convolve_row": {"y", "inputs"},
    "advance_late": {"state.boundary"},
    "row_factors": {f"factors.{part}" for part in RowFactors._fields},
    "chunk_factors": {f"scratch.{part}" for part in ChunkScratch._fields},
    "pass_chunks": {"out", *_STATE},
    "convolve_rows": {"y"},
    "keep_inputs": {"inputs"},
    "pass_whole_chunks": {"out_tiles", "boundary"},
    "decode_factors": {
        "state.keys", "state.inverses", "state.decays",
        *(f"scratch.{part}" for part in DecodeScratch._fields),
    },
    "decode_rows": {"out", "state.updates"},
}  # fmt: skip
"""Arguments that a kernel writes; of others those of these names."""
RESULTS = {"y", "y_tiles", "out", "operands.out"}
PARTLY = {
    "pages.0",
    "pages.1",
    "inputs",
    "boundary",
    *_STATE,
}  # what was there before stands beside what is written


class Memory:
    """Names by address; what nobody wrote is named by where it lies."""

    def __init__(self):
        self.sizes, self.launches, self.kernels = {}, [], set()
        self.clear()

    def clear(self):
        """Forget all values, not how much each kind of launch writes."""
        self.values = {}
        self.launches.clear()

    def name(self, address):
        """What stands there: the name of a value, and the place in it."""
        for begin, (size, name) in self.values.items():
            if begin <= address < begin + size:
                return name, address - begin
        return address

    def write(self, address, size, name):
        kept = self.values.items()
        apart = {at: it for at, it in kept if at + it[0] <= address or address + size <= at}
        self.values = apart | {address: (size, name)}

    def launch(self, function, grid, arguments):
        kernel = function.fn.__name__
        self.kernels.add(kernel)
        read, written = [f"{kernel} {grid}"], []
        results, numbers = WRITTEN.get(kernel, RESULTS), []
        for name, value in _named(function.arg_names, arguments):
            base = getattr(value, "base", value)
            if not _is_address(base):
                numbers.append(value)
            if name in results:
                written.append((name, base))
            if name not in results or name in PARTLY:
                read.append((value, base))
        to = {self.address(base) for name, base in written if name not in PARTLY}
        read = [it if isinstance(it, str) else self.read(*it, to) for it in read]
        made = hash(str(read))
        self.launches.append(made)
        for name, base in written:
            kind = kernel, grid, name, str(numbers)
            if hasattr(base, "nbytes"):
                self.sizes[kind] = base.nbytes
            self.write(self.address(base), self.sizes[kind], hash((made, name)))

    def address(self, base):
        return base.data_ptr() if hasattr(base, "data_ptr") else base

    def read(self, value, base, written):
        """What an argument says; a pointer to what is written stands for none."""
        if not _is_address(base):
            return value
        described = [str(getattr(value, it, "")) for it in ("shape", "strides", "block_shape")]
        at = self.address(base)
        return at not in written and self.name(at), described if base is not value else ""


def _is_address(value):
    return hasattr(value, "data_ptr") or (isinstance(value, int) and value > 1 << 32)


def _named(names, arguments):
    """Names and values of arguments; the fields of a tuple one by one."""
    for name, value in zip(names, arguments, strict=True):
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            for field, each in zip(fields, value, strict=True):
                yield f"{name}.{field}", each
        else:
            yield name, value


class SymbolicKernel(CompiledKernel):
    """Stands for a compiled kernel."""

    def __init__(self, function, memory):
        self.function, self.packed_metadata, self.module = function, (4, 1, 0), None
        self._memory, self._run = memory, self._launch

    def _launch(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        self._memory.launch(function, (x, y, z), arguments)

    def launch_metadata(self, *_):
        return None


@contextmanager
def compiled_as(make):
    """Within, kernels are what `make(function, signature, constants, options, attrs)` gives."""
    kept = []

    def made(self, key, signature, device, constexprs, options, attrs, warmup):
        kernels = self.device_caches[device][0]
        kept.append((kernels, key))
        kernel = kernels[key] = make(self, signature, constexprs, options, attrs)
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", made)
        yield
    for kernels, key in kept:
        del kernels[key]


@contextmanager
def symbolic_launches():
    """All launches inside name what they make in the memory that it yields."""
    memory = Memory()
    with compiled_as(lambda function, *_: SymbolicKernel(function, memory)):
        yield memory
