"""The two launches of a decode step's gated delta rule: `decode_factors.py`, `decode_rows.py`."""

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.linear.decode_factors import decode_factors
from tpdet.kernels.cuda.linear.decode_rows import DEPTH, decode_rows
from tpdet.kernels.cuda.linear.gates import DeltaStep
from tpdet.kernels.cuda.linear.tables import DecodeScratch, LinearShape, Tables
from tpdet.kernels.inputs.linear_state import DeltaGates, LinearState
from tpdet.kernels.order import CHUNK_TOKENS

WARPS = 4  # of 16 columns each
FACTOR_WARPS = 1
REGISTERS = 96
"""A thread of either launch has at most so many: few spill, and more programs run at once."""


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
    decode_factors[(count, shape.KEY_HEADS)](
        step,
        gates,
        state,
        scratch,
        tables,
        shape.KEY_SIZE**-0.5,
        SHAPE=shape,
        num_warps=FACTOR_WARPS,
        maxnreg=REGISTERS,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    decode_rows[(count, heads, cdiv(shape.VALUE_SIZE, 16 * WARPS))](
        step.v,
        step.v_stride,
        state,
        scratch,
        tables,
        out,
        SHAPE=shape,
        WARPS=WARPS,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
