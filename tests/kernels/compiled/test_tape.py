"""Launches that are noted once are made again over other weights, or not at all."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs

from tests.lib.kernels.symbolic_launches import symbolic_launches
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.launch.tape import Pattern, taping
from tpdet.tools.compile.asked import on_gpu


@triton.jit
def scale_rows(x, w, y, count):
    at = tl.arange(0, 16)
    tl.store(y + at, tl.load(x + at, mask=at < count) * tl.load(w + at), mask=at < count)


@pytest.fixture
def memory():
    with on_gpu(H200), symbolic_launches() as made:
        yield made


def weights(count=3):
    return [torch.randn(16, 16) for _ in range(count)]


def scaled(x, w, count=16, grid=1):
    y = torch.empty_like(x)
    scale_rows[grid,](x, w[1:], y, count)
    return y


def taped(work, x, w, **more):
    with taping((x,)) as tape:
        made = work(x, w, **more)
    return tape, made


def test_a_product_of_the_library_is_made_again_by_itself(memory):
    x, (first, second, third) = torch.randn(4, 16), weights()
    product = lambda x, w: torch.mm(x, w.t())
    (mine, y), (other, _) = taped(product, x, first), taped(product, x, second)
    pattern = Pattern.of(mine, other, [(first, second)])
    expected = product(x, third)
    assert not torch.equal(y, expected)
    pattern.launch({first.data_ptr(): third})
    assert torch.equal(y, expected) and pattern.alignment == 256


def test_a_launch_is_made_again_over_another_weight(memory):
    x, (first, second, third) = torch.randn(16), weights()
    (mine, y), (other, _) = taped(scaled, x, first), taped(scaled, x, second)
    pattern = Pattern.of(mine, other, [(first, second)])
    expected = memory.name(scaled(x, third).data_ptr())
    assert memory.name(y.data_ptr()) != expected and pattern.alignment == 16
    pattern.launch({first.data_ptr(): third})
    assert memory.name(y.data_ptr()) == expected


def test_results_lie_where_they_are_wanted(memory):
    x, (w, *_) = torch.randn(16), weights()
    mine, y = taped(scaled, x, w)
    with taping((x,), {mine.at(y): x}):
        assert scaled(x, w).data_ptr() == x.data_ptr()
    with taping((x,), {mine.at(y): x[1:]}) as other:
        assert scaled(x, w).shape == x.shape
    assert "where" in other.refused


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w: scaled(x, w, grid=2),
        lambda x, w: scaled(x, w, count=15),
        lambda x, w: scaled(scaled(x, w), w),
        lambda x, w: scaled(x, w[1:]),
        lambda x, w: scaled(torch.randn(16), w),  # of memory that nobody explains
        lambda x, w: scaled(x + 1, w),
        lambda x, w: torch.mm(x.view(1, 16), w),
    ],
)
def test_what_differs_in_more_than_weights_is_no_pattern(memory, other):
    x, (first, second, _) = torch.randn(16), weights()
    (mine, _), (theirs, _) = taped(scaled, x, first), taped(other, x, second)
    assert Pattern.of(mine, taped(scaled, x, second)[0], [(first, second)]) is not None
    assert Pattern.of(mine, theirs, [(first, second)]) is None
    assert Pattern.of(mine, taped(scaled, x, second)[0], [(second, first)]) is None


def test_a_profiler_that_watches_launches_sees_each(memory, monkeypatch):
    x, (w, *_) = torch.randn(16), weights()
    seen = []
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [seen.append])
    assert taped(scaled, x, w)[0].refused == "hooks of launches"


def test_a_start_does_not_import_torchs_compiler_for_a_tape():
    code = (
        "import sys, torch\n"
        "from tpdet.kernels.cuda.launch.tape import taping\n"
        "with taping(()) as tape: torch.empty(4).view(2, 2)\n"
        "print(len(tape.made), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
