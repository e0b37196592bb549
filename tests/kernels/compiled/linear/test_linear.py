"""Kernels of linear attention, without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

from tests.lib.kernels.hopper_kernels import hopper_kernel
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.linear import chunk_factors, convolution, gated_norm, gates, pass_chunks
from tpdet.kernels.cuda.linear.gates import DeltaStep, RowFactors
from tpdet.kernels.cuda.linear.tables import ChunkScratch, LinearShape, Tables
from tpdet.kernels.cuda.pointwise import gate
from tpdet.kernels.cuda.pointwise.norm import eps_bits
from tpdet.kernels.inputs.linear_state import DeltaGates, LinearState

ROWS, FP32, INT32 = "*bf16", "*fp32", "*i32"
SHAPE = LinearShape(16, 2, 128, 128, 128, 32, 128, True)
TYPES = {
    "step": DeltaStep(ROWS, ROWS, ROWS, FP32, FP32, *(5 * ["i32"])),
    "gates": DeltaGates(FP32, FP32),
    "factors": RowFactors(FP32, FP32, FP32, "*i64"),
    "state": LinearState(FP32, ROWS, FP32, FP32, "*i64", ROWS),
    "scratch": ChunkScratch(ROWS, FP32, FP32, FP32, FP32),
    "tables": Tables(INT32, INT32, INT32),
    "moves": INT32,
    "inputs": ROWS,
    "scale": "fp32",
    "weight": FP32,
    "sums": FP32,
    "gate": ROWS,
}
TYPES |= dict.fromkeys(("out", "x", "y", "o", "z"), ROWS)
TYPES |= dict.fromkeys(
    ("m", "count", "stride", "z_stride", "channels", "ring", "width", "gate_stride", "rows"), "i32"
)
"""The types of all kernels' arguments, by name."""
CASES = [
    (gates.row_factors, {"KEY_HEADS": 16, "GROUP": 2, "SIZE": 128, "LANES": 128, "ROWS": 16}, 0),
    (convolution.convolve_rows, {"ROWS": 16, "CHANNELS": 128}, 0),
    (convolution.keep_inputs, {"ROWS": 16, "CHANNELS": 128}, 0),
    (
        gated_norm.norm_and_gate,
        {"HEADS": 32, "N": 128, "EPS_BITS": eps_bits(1e-6), "ROWS": 8, "BLOCK": 128},
        0,
    ),
    (gate.gate_values, {"BLOCK": 1024}, 0),
    (gate.gate_sums, {"BLOCK": 1024}, 0),
    (chunk_factors.chunk_factors, {"SHAPE": SHAPE}, 0),
    (pass_chunks.advance_chunks, {"SHAPE": SHAPE}, 0),
    (pass_chunks.advance_late, {"SHAPE": SHAPE, "SEQUENCES": 256}, 0),
    (pass_chunks.pass_chunks, {"SHAPE": SHAPE}, 400),
]
"""Kernels, constants, and the bytes a thread that may be spilled."""


@pytest.mark.parametrize(("kernel", "constants", "spills"), some_slow(CASES[:-1], CASES))
def test_a_kernel_fuses_nothing_and_adds_nothing_in_memory(kernel, constants, spills):
    """Products of bf16 go to the matrix unit; no fma, no atomic, no tf32."""
    types = {name: TYPES[name] for name in kernel.arg_names if name in TYPES}
    aligned = [name for name in types if name not in ("m", "count", "scale")]
    options = {"num_warps": 4, "num_stages": 3}
    done = hopper_kernel(kernel, types, constants, aligned, options)
    assert not re.search(r"(?<![a-z])(?:fma\.rn|atom|red)\.|tf32", done.ptx)
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", done.log)]
    assert spilled and max(spilled) <= spills, done.log
    products = "SHAPE" in constants
    assert ("wgmma.mma_async" in done.ptx) == products
