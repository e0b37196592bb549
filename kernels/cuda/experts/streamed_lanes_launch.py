"""Which steps `streamed_lanes.py` takes, and its launch."""

from functools import cache

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts.streamed_lanes import (
    COLUMNS,
    ROWS,
    WARPS,
    StreamedForm,
    stream_lanes,
)
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.launch.warp_pipeline import tile_layout
from tpdet.kernels.fold_program import own_program
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.inputs.shared_rows import SharedRows

_MORE_BYTES = 2048  # barriers, and what lies unused between buffers


def streams(width: int, held: int, leaf: int, chosen: int, device: torch.device) -> bool:
    """Whether the kernel takes lanes of `width` columns, of `held` leaves of so many inputs."""
    gpu, rows, columns = hardware.gpu_of(device), ROWS.value, COLUMNS.value
    operands = held * leaf * (rows + columns) * 2
    choices = chosen * rows * (2 * columns + 4 * held + 8)
    room = operands + choices + _MORE_BYTES <= gpu.shared_bytes
    cut = leaf in (16, 32, 64) and width % columns == 0 and held & held - 1 == 0
    return gpu.wgmma and room and cut


@cache
def programs_of_rows(blocks: int, parts: int, programs: int) -> int:
    """How many programs share the `parts` blocks of columns of each block of rows, of `blocks`.

    As few rounds of `programs` at a time as can be, each part and each start counted as one.
    """
    rounds = lambda count: cdiv(blocks * count, programs) * (cdiv(parts, count) + 1)
    return min(range(1, parts + 1), key=rounds)


def weights_by_column(held: int, width: int, leaf: int) -> tuple[list[int], list[int]]:
    """Shape and strides of down [L, N, K] as the kernel reads it: a block's column 16j + 2i + k is
    found in the order i, j, k."""
    return [held, 8, width // 16, 2, leaf], [width * leaf, 2 * leaf, 16 * leaf, leaf, 1]


def stream(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    lanes: Lanes,
    shared: SharedRows,
    sums: torch.Tensor,
) -> None:
    """Fill the sums [R, M, N]; operands as `fold_lanes_with_shared` has them."""
    (rows, chosen), width = ids.shape, y.shape[1]
    mixed, down, gate = shared
    held, leaf = lanes.held, down.shape[2]
    blocks, parts = cdiv(rows, ROWS.value), width // COLUMNS.value
    programs = programs_of_rows(blocks, parts, multiprocessors(y.device))
    apart, steps = weights_by_column(held, width, leaf)
    block = [held, 8, COLUMNS.value // 16, 2, leaf]
    stream_lanes[(blocks * programs,)](
        y,
        ids,
        weights,
        positions,
        TensorDescriptor.from_tensor(mixed, [ROWS.value, leaf], tile_layout(2 * leaf, 16)),
        TensorDescriptor(down, apart, steps, block, tile_layout(2 * leaf, 16, 5)),
        sums if gate is None else gate,
        sums,
        rows,
        width,
        lanes.experts.start,
        1 if gate is None else gate.stride(0),
        programs,
        FORM=StreamedForm(chosen, len(lanes.experts) // held, leaf, gate is not None),
        PROGRAM=own_program(lanes.roots),
        num_warps=WARPS.value,
        enable_fp_fusion=False,
        **dependent_launch(y.device),
    )
