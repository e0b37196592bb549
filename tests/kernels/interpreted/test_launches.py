"""How many kernels a step's samples take, in order: counted in Triton's interpreter."""

from functools import partial
from importlib import import_module

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tpdet.kernels import ops
from tpdet.kernels.cuda.sampling import launch, search
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.sampling import sampler

FREE = {"empty", "view", "_unsafe_view", "select", "slice", "expand", "detach", "alias",
        "lift_fresh", "t", "transpose", "unsqueeze"}  # fmt: skip


class Counted(TorchDispatchMode):
    """Names of what launches a kernel: Triton's, and torch's operations that are none of `FREE`."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in FREE and not self.inside:
            self.names.append(name)
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.run, self.inside = GridExecutor.__call__, False
        GridExecutor.__call__ = lambda grid, *args, **named: self.launch(grid, args, named)
        return super().__enter__()

    def __exit__(self, *raised):
        GridExecutor.__call__ = self.run
        return super().__exit__(*raised)

    def launch(self, grid, args, named):
        self.names.append(grid.fn.__name__)
        self.inside = True
        self.run(grid, *args, **named)
        self.inside = False


class Alone:
    """An exchange of rows among ranks that all hold what this one does."""

    def whole_rows(self, x):
        return x[: len(x) // 4].repeat(1, 4)

    def all_gather(self, x):
        return x.expand(4, *x.shape)


FILTERED = (
    "choose_floor",
    "list_candidates",
    "bound_candidates",
    "count_buckets",
    "collect_window",
    "bound_fallbacks",
)


def test_a_step_by_shares_launches_no_more_than_this():
    """In order; the exchange of rows and the gather of answers are two more."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 1024, generator=generator)[1:5] * 3  # the first lists more than 128 ids
    kernels = ops._kernels
    ops._kernels = lambda _, name: import_module(f"tpdet.kernels.cuda.{name}")
    to_device, sampler.to_device = sampler.to_device, lambda numbers, _: torch.tensor(numbers)
    try:
        for way, filters in (
            ({"temperature": 0.8, "top_k": 50, "top_p": 0.9}, FILTERED),
            ({"temperature": 1.0, "min_p": 0.1}, ()),
            ({"temperature": 0.0}, ()),
        ):
            how = [RowParams(seed=i, position=1, **way) for i in range(4)]
            with Counted() as seen:
                sampled = sampler.sample_shared(x, how, [None] * 4, Alone(), 0, 4, 4096)
            assert seen.names == [
                "repeat",
                "scan_peaks",
                *filters,
                "sum_rows",
                "log_",
                "pack_rows",
            ], seen.names
            expected = launch.sample_rows(x[:1].repeat(1, 4), how[:1], Shard(0, 4096))
            assert torch.equal(sampled.packed, expected.packed.repeat(4, 1)), way
            assert torch.equal(sampled.tokens, expected.tokens.repeat(4)), way
            if filters:
                continue  # minutes in the interpreter; the ranks are counted alike
            # Ranks are counted only where log-probabilities are asked for, in one reading.
            with Counted() as asked:
                sampler.sample_shared(x, how, [0] * 4, Alone(), 0, 4, 4096)
            counted = 0 if way == {"temperature": 0.0} else 1
            assert asked.names.count("count_parts") == counted, asked.names
    finally:
        ops._kernels, sampler.to_device = kernels, to_device


def test_memory_that_nobody_wrote_is_never_read():
    """What counts arrivals or is added to is cleared by a kernel before: here it begins full."""
    x = torch.randn(4, 3000, generator=torch.Generator().manual_seed(8)) * 3
    x[1] = torch.round(x[1])
    how = [
        RowParams(seed=i, position=1, temperature=i * 0.4, top_k=50 * (i < 2) - 1, top_p=0.9)
        for i in range(4)
    ]
    expected = launch.sample_rows(x, how, Shard(0, 3000)).packed
    torch.use_deterministic_algorithms(True)  # empty tensors begin with the largest integer
    try:
        assert torch.empty(1, dtype=torch.int32) == 2**31 - 1
        for methods in (search.METHODS, ("window",)):
            launch.find_bounds = partial(search.find_bounds, methods=methods)
            found = launch.sample_rows(x, how, Shard(0, 3000)).packed
            assert torch.equal(found, expected), methods
    finally:
        launch.find_bounds = search.find_bounds
        torch.use_deterministic_algorithms(False)
