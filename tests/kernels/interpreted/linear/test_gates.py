"""Gates of heads and of shared experts in Triton's interpreter: near the CPU, a row by itself."""

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tpdet.kernels.cpu.pointwise import gate as cpu_gate
from tpdet.kernels.cuda.pointwise import gate

GENERATOR = torch.Generator().manual_seed(6)


def test_gates_of_heads_are_near_the_cpu_and_a_row_has_its_own_bits():
    for dtype, heads, size in ((torch.bfloat16, 3, 64), (torch.float32, 5, 256)):
        wide = torch.randn(4, 2 * heads * size + 8, generator=GENERATOR).to(dtype) * 20
        gates = wide[:, 8 : 8 + heads * size].view(4, heads, size)
        x = torch.randn(4, heads, size, generator=GENERATOR).to(dtype)
        gates[0, 0, 0], gates[0, 0, 1] = torch.inf, -torch.inf
        got, near = gate.gate_heads(x, gates), cpu_gate.gate_heads(x, gates)
        bound = 2.0**-7 if dtype == torch.bfloat16 else 2e-6
        assert ((got - near).abs() <= bound * near.abs() + 1e-12).all()
        assert got[0, 0, 0] == x[0, 0, 0] and got[0, 0, 1] == 0
        assert_same_bits(gate.gate_heads(x[2:3], gates[2:3]), got[2:3], "a row alone")


def test_gates_of_rows_are_near_the_cpu_and_one_lane_has_its_own_bits():
    sums, gates = torch.randn(3, 4, 1100, generator=GENERATOR), torch.linspace(-9, 9, 4)[:, None]
    got, near = gate.gate_lanes(sums, gates), cpu_gate.gate_lanes(sums, gates)
    assert ((got - near).abs() <= 2e-6 * near.abs()).all()
    assert_same_bits(gate.gate_lanes(sums[1:2, 2:3], gates[2:3]), got[1:2, 2:3], "a row alone")


def test_rows_that_lie_apart_are_refused():
    x = torch.randn(2, 3, 64)
    with pytest.raises(ValueError, match="a row must be contiguous"):
        gate.gate_heads(x, x.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match="both must be contiguous"):
        gate.gate_lanes(x.transpose(0, 1), x[:, :1, 0])
