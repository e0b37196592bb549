"""The two launches of a decode step's gated delta rule: `decode_factors.py`, `decode_rows.py`."""

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.linear.decode_factors import decode_factors
from tpdet.kernels.cuda.linear.decode_rows import DEPTH, decode_rows
from tpdet.kernels.cuda.linear.gates import DeltaStep
from tpdet.kernels.cuda.linear.tables import DecodeScratch, LinearShape, Tables
from tpdet.kernels.inputs.linear_state import DeltaGates, LinearState
from tpdet.kernels.order import CHUNK_TOKENS

WARPS, TILES = 4, 1  # of a program of `decode_rows`; a warp has so many tiles of 16 columns
FACTOR_WARPS = 1
FACTOR_FORM = 32, 4
"""`decode_factors` reads so many numbers of keys at a time, in so many stages."""


def takes_rows_alone(key_size: int, device: torch.device) -> bool:
    """Whether rows in bf16 that are a sequence's only ones have kernels for keys of this size."""
    on_gpu = hardware.room_of(device.type) == "cuda"
    return on_gpu and key_size >= DEPTH.value and not key_size & (key_size - 1)


def launch_decode(
    step: DeltaStep,
    gates: DeltaGates,
    state: LinearState,
    tables: Tables,
    out: torch.Tensor,
    shape: LinearShape,
) -> None:
    """Rows of the sequences that have one: o [M, Hv, Dv], and the rings."""
    count, heads, device = len(tables.states), shape.KEY_HEADS * shape.GROUP, out.device
    scratch = DecodeScratch(
        step.k.new_empty(count, shape.KEY_HEADS, 2, shape.KEY_SIZE),
        step.k.new_empty(count, heads, 2, 2, CHUNK_TOKENS),
        torch.empty(count, heads, 4, dtype=torch.float32, device=device),
    )
    decode_factors[(shape.KEY_HEADS, count)](
        step,
        gates,
        state,
        scratch,
        tables,
        shape.KEY_SIZE**-0.5,
        SHAPE=shape,
        GROUPS=next_power_of_2(shape.GROUP),
        FORM=FACTOR_FORM,
        num_warps=FACTOR_WARPS,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    decode_rows[(cdiv(shape.VALUE_SIZE, 16 * TILES * WARPS), heads, count)](
        step.v,
        step.v_stride,
        state,
        scratch,
        tables,
        out,
        SHAPE=shape,
        WARPS=WARPS,
        TILES=TILES,
        num_warps=WARPS,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
