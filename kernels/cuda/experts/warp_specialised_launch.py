"""The launch of the warp-specialised products of experts."""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.experts.warp_specialised import WEIGHT_ROWS, warp_specialised_groups
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.warp_pipeline import CONSUMER_ROWS, tile_layout

_LINE = 128  # bytes of a row of a stage: one swizzled line
_BARRIERS = 1024  # bytes
_SLOTS = (8, 16, 32, 64, 128, 256)


def takes(tile: Tile, n: int, k: int, size: int, gated: bool) -> bool:
    """Whether it computes products by experts' weights [n, k] of values of `size` bytes."""
    pair = 2 if gated else 1
    cut = tile.variant == "warp_swapped" and tile.depth * size == _LINE and k % tile.depth == 0
    wide = tile.columns == WEIGHT_ROWS.value and tile.rows in _SLOTS and n % (8 * pair) == 0
    room = tile.stage_bytes + tile.rows * tile.columns * size // pair + _BARRIERS
    return size == 2 and cut and wide and room <= H200.shared_bytes


def run_warp_specialised(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    blocks: torch.Tensor,
    tile: Tile,
    programs: int,
    shared: bool,
    activation: str,
) -> None:
    """x [S, K], shared [M, K]; w [E, N, K], bias [E, N] or None -> y [S, N], filled."""
    (count, n, k), rows, size = w.shape, CONSUMER_ROWS.value, x.element_size()
    across = rows // 2 if activation else rows
    stage = tile_layout(_LINE, 8 * size)
    slot = tile_layout(across * size, 8 * size)
    warp_specialised_groups[(programs,)](
        TensorDescriptor.from_tensor(w.view(count * n, k), [rows, tile.depth], stage),
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth], stage),
        TensorDescriptor.from_tensor(y, [tile.rows, across], slot),
        w if bias is None else bias,
        blocks,
        n,
        k // tile.depth,
        SLOTS=tile.rows,
        BK=tile.depth,
        SHARED=shared,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        STAGES=tile.stages,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
