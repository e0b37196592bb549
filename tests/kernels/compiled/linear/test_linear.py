"""Kernels of linear attention, without a GPU: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.language import NVMMASharedLayout

from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.lib.kernels.driverless import changed_by_a_journey, compile_for_hopper, take_gpu_kernels
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.launch.dependent import FIRST, SECOND
from tpdet.kernels.cuda.linear import (
    admission,
    chunk_factors,
    convolution,
    decode_factors,
    decode_launch,
    decode_rows,
    delta_rule,
    forms,
    gated_norm,
    gates,
    pass_chunks,
    products,
    whole_chunks,
)
from tpdet.kernels.cuda.linear.gates import DeltaStep, RowFactors
from tpdet.kernels.cuda.linear.tables import ChunkScratch, DecodeScratch, LinearShape, Tables
from tpdet.kernels.cuda.pointwise import gate
from tpdet.kernels.cuda.pointwise.norm import eps_bits
from tpdet.kernels.inputs.linear_state import DeltaGates, LinearState

ROWS, FP32, INT32 = "*bf16", "*fp32", "*i32"
SHAPE = LinearShape(16, 2, 128, 128, 128, 32, 128, True, True)
LINE, TILE_LINE = (NVMMASharedLayout(width, 16, 2) for width in (128, 32))
TYPES = {
    "step": DeltaStep(ROWS, ROWS, ROWS, FP32, FP32, *(5 * ["i32"])),
    "gates": DeltaGates(FP32, FP32),
    "factors": RowFactors(FP32, FP32, FP32, "*i64"),
    "state": LinearState(FP32, ROWS, FP32, FP32, "*i64", ROWS, ROWS),
    "scratch": ChunkScratch(ROWS, FP32, ROWS, FP32, "*i64"),
    "tables": Tables(INT32, INT32, INT32, INT32),
    "moves": INT32,
    "inputs": ROWS,
    "tails": ROWS,
    "scale": "fp32",
    "sums": FP32,
    "gate": ROWS,
    "q_tiles": f"tensordesc<bf16[32,64],{LINE!r}>",
    "k_tiles": f"tensordesc<bf16[64,64],{LINE!r}>",
    "v_tiles": f"tensordesc<bf16[16,64],{LINE!r}>",
    "out_tiles": f"tensordesc<bf16[16,64],{LINE!r}>",
    "term_tiles": f"tensordesc<bf16[256,16],{TILE_LINE!r}>",
}
TYPES |= dict.fromkeys(("out", "x", "y", "o", "z", "v"), ROWS)
TYPES |= dict.fromkeys(("weight", "vectors", "boundary"), FP32)
TYPES |= dict.fromkeys(
    (
        "m",
        "count",
        "stride",
        "z_stride",
        "v_stride",
        "channels",
        "ring",
        "slots",
        "width",
        "gate_stride",
        "rows",
    ),
    "i32",
)
"""The types of all kernels' arguments, by name."""
OF_DECODE = {"scratch": DecodeScratch(ROWS, ROWS, FP32)}
JOINED = {"weight": "*i64"}
"""Four factors of two bytes, which a convolution reads at once."""
NORM = {"HEADS": 32, "N": 128, "EPS_BITS": eps_bits(1e-6), "ROWS": 8, "BLOCK": 128}
WHOLE = {"SHAPE": SHAPE, "KEY_STAGES": 2, "STAGES": 1}
ALL = {"SHAPE": SHAPE, "PART": pass_chunks.ALL_CHUNKS}
FACTORS = {"SHAPE": SHAPE, "GROUPS": 2, "FORM": decode_launch.FACTOR_FORM}
ROWS_ALONE = {"SHAPE": SHAPE, "WARPS": decode_launch.WARPS, "TILES": decode_launch.TILES}
CASES = [
    (
        gates.row_factors,
        {"KEY_HEADS": 16, "GROUP": 2, "PAD": 2, "SIZE": 128, "LANES": 128, "ROWS": 16},
        "",
        0,
    ),
    (gate.gate_values, {"BLOCK": 1024}, "", 0),
    (gate.gate_sums, {"BLOCK": 1024}, "", 0),
    (convolution.convolve_row, {"CHANNELS": 512}, "", 0),
    (convolution.convolve_rows, {"ROWS": 16, "CHANNELS": 512}, "", 0),
    (convolution.keep_inputs, {"ROWS": 16, "CHANNELS": 128}, "", 0),
    (gated_norm.norm_and_gate, NORM, "", 0),
    (decode_factors.decode_factors, FACTORS, "mma.sync", 48),
    (decode_rows.decode_rows, ROWS_ALONE, "mma.sync", 0),
    (chunk_factors.chunk_factors, {"SHAPE": SHAPE}, "mma.sync", 76),
    (whole_chunks.pass_whole_chunks, WHOLE, "wgmma.mma_async", 720),
    (pass_chunks.advance_chunks, {"SHAPE": SHAPE}, "wgmma.mma_async", 0),
    (pass_chunks.advance_late, {"SHAPE": SHAPE, "SEQUENCES": 512}, "wgmma.mma_async", 0),
    (pass_chunks.pass_chunks, ALL, "wgmma.mma_async", 400),
]
"""Kernels, constants, instruction of products, and the bytes a thread that may be spilled."""


OPTIONS = {
    "chunk_factors": delta_rule.FACTOR_OPTIONS,
    "row_factors": {"num_warps": gates.WARPS},
    "decode_factors": {"num_warps": decode_launch.FACTOR_WARPS},
    "decode_rows": {"num_warps": decode_launch.WARPS},
}
"""They stand for kernels that have other warps than four, or a limit of registers."""


def compiled(kernel, constants, others=()):
    """A kernel of `CASES`, some types of it others, checked as its part of a pair is."""
    decode = kernel.__name__.startswith("decode")
    known = (TYPES | OF_DECODE if decode else TYPES) | dict(others)
    types = {name: known[name] for name in kernel.arg_names if name in known}
    tiled = lambda kind: isinstance(kind, str) and kind.startswith("tensordesc")
    aligned = [
        n for n, kind in types.items() if n not in ("m", "count", "scale") and not tiled(kind)
    ]
    options = {"num_warps": 4, "num_stages": 3} | OPTIONS.get(kernel.__name__, {})
    return hopper_kernel(kernel, types, constants, aligned, options)


@pytest.mark.parametrize(("kernel", "constants", "product", "spills"), some_slow(CASES[:-2], CASES))
def test_a_kernel_fuses_nothing_and_adds_nothing_in_memory(kernel, constants, product, spills):
    """Products of bf16 go to the matrix unit; no fma, no atomic, no tf32."""
    done = compiled(kernel, constants)
    assert not re.search(r"(?<![a-z])(?:fma\.rn|atom|red)\.|tf32", done.ptx)
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", done.log)]
    assert spilled and max(spilled) <= spills, done.log
    assert ("mma" in done.ptx) == bool(product) and product in done.ptx


def test_a_convolution_of_single_rows_lets_in_what_moves_states_on():
    """They are a pair: the first one waits and lets the second in, which waits at its end."""
    first = compiled(convolution.convolve_row, {"CHANNELS": 512, "DEPENDENT": FIRST}, JOINED)
    assert not re.search(r"ld\.global\.b?16", first.ptx), "a factor alone"
    late = {"SHAPE": SHAPE, "SEQUENCES": 512, "DEPENDENT": SECOND}
    compiled(pass_chunks.advance_late, late)


def test_decode_rows_wait_for_copies_alone():
    """Four programs are on a multiprocessor, whose warps meet when a group of copies has come."""
    types = {n: (TYPES | OF_DECODE)[n] for n in decode_rows.decode_rows.arg_names[:6]}
    options = {"num_warps": decode_launch.WARPS}
    done = hopper_kernel(decode_rows.decode_rows, types, ROWS_ALONE, [*types], options)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.* 0x(\w+), ", done.ptx)
    assert copies and {*copies} == {"10"}, "copies of 16 bytes"
    assert len(re.findall(r"\bbar(?:rier)?\.", done.ptx)) == 2
    assert 4 * (done.shared + 1024) <= 228 * 1024


def test_what_a_start_tries_is_compiled_by_helpers_too(monkeypatch, tmp_path):
    """Each kernel of all forms is the same where another process compiles it."""
    compile_for_hopper(monkeypatch, tmp_path)
    take_gpu_kernels(monkeypatch)
    tried, there = ((2, 4, 64, 64), torch.device("cpu")), hardware.pretending(hardware.H200)
    with there, forms.trying(*reversed(tried), frozenset()), recording() as asked:
        assert len(admission.admit_forms(*tried)[0]) == 2
    names = [each.name for each in asked.values()]
    assert {"decode_rows", "pass_whole_chunks"} < {*names} and names.count("advance_late") == 1
    assert names.count("pass_chunks") == 4, "all chunks of both, the ends of whole ones"
    assert changed_by_a_journey(asked.values()) == []


@triton.jit
def two_terms(left, right, y):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    none = tl.zeros((16, 16), tl.float32)
    high, low = products.high_and_low(tl.load(right + at), True)
    chains = products.add_exact(tl.load(left + at), high, low, (none, none), True)
    tl.store(y + at, products.sum_of_exact(chains, True))


@triton.jit
def joined_terms(left, right, y):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    none = tl.zeros((16, 16), tl.float32)
    high, low = products.high_and_low(tl.load(right + at), True)
    left = tl.load(left + at)
    tl.store(y + at, tl.dot(left, low, none) + tl.dot(left, high, none))


def test_two_chains_are_added_not_joined():
    """Triton makes x + dot(a, b, 0) into dot(a, b, x), which is another sum."""
    types = {"left": ROWS, "right": FP32, "y": FP32}
    made = lambda kernel: hopper_kernel(kernel, types, {}, (), {"num_warps": 1}).ptx
    added = lambda ptx: len(re.findall(r"(?<![a-z])add(?:\.rn)?\.f32", ptx))
    assert added(made(two_terms)) == 8, "a thread has 8 of 256 sums"
    assert added(made(joined_terms)) == 0, "Triton joins no chains any more: ended() can go"
