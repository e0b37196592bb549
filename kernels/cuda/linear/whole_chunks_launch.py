"""The launch of the pass over whole chunks (`whole_chunks.py`)."""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.warp_pipeline import tile_layout
from tpdet.kernels.cuda.linear.gates import DeltaStep
from tpdet.kernels.cuda.linear.tables import ChunkScratch, LinearShape, Tables
from tpdet.kernels.cuda.linear.whole_chunks import BOX, COLUMNS, HALF, pass_whole_chunks
from tpdet.kernels.inputs.linear_state import BLOCK_ROWS, LinearState
from tpdet.kernels.order import CHUNK_TOKENS

_LINE = 128  # bytes of a swizzled line
_TILE_LINE = 32  # bytes of a tile's row
_BITS = 16
KEY_STAGES, STAGES = 2, 1
"""With so few, two programs have room on a multiprocessor: one computes while the other waits."""


def takes_whole_chunks(key_size: int, value_size: int, device: torch.device) -> bool:
    """Whether there is a pass over whole chunks for heads in bf16 of these sizes on this GPU."""
    even = key_size in (HALF.value, 2 * HALF.value) and value_size % COLUMNS.value == 0
    return even and hardware.gpu_of(device).wgmma


def launch_whole_chunks(
    step: DeltaStep,
    state: LinearState,
    scratch: ChunkScratch,
    tables: Tables,
    out: torch.Tensor,
    shape: LinearShape,
) -> None:
    """All whole chunks of new rows that are not their sequence's last: o and the states."""
    line, tile_line = tile_layout(_LINE, _BITS), tile_layout(_TILE_LINE, _BITS)
    tiles = scratch.tiles.view(-1, BLOCK_ROWS)
    heads = shape.KEY_HEADS * shape.GROUP
    q, k, v, o = (
        TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [stride, 1], block, line)
        for x, stride, block in (
            (step.q, step.q_stride, [CHUNK_TOKENS // 2, HALF.value]),
            (step.k, step.k_stride, [CHUNK_TOKENS, HALF.value]),
            (step.v, step.v_stride, [BLOCK_ROWS, COLUMNS.value]),
            (out, out.stride(0), [BLOCK_ROWS, COLUMNS.value]),
        )
    )
    runs = len(tables.runs if shape.ALONE else tables.states)
    pass_whole_chunks[(heads, shape.VALUE_SIZE // COLUMNS.value, runs)](
        q,
        k,
        v,
        TensorDescriptor.from_tensor(tiles, [BOX.value, BLOCK_ROWS], tile_line),
        o,
        scratch.vectors,
        state.boundary,
        tables,
        SHAPE=shape,
        KEY_STAGES=KEY_STAGES,
        STAGES=STAGES,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(out.device),
    )
