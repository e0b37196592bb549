"""The launch of the warp-specialised products of experts."""

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.experts.warp_specialised import LONG_ROWS, warp_specialised_groups
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.warp_pipeline import CONSUMER_ROWS

SWAPPED = "warp_swapped"
PLAIN = "warp_specialised"
_LINE = 128  # bytes of a row of a stage: one swizzled line
_BARRIERS = 1024  # bytes


def takes(tile: Tile, n: int, k: int, size: int, gated: bool) -> bool:
    """Whether it computes products by experts' weights [n, k] of values of `size` bytes."""
    pair = 2 if gated else 1
    if size != 2 or tile.depth * size != _LINE or k % tile.depth or n % (8 * pair):
        return False
    long = tile.columns if tile.variant == SWAPPED else tile.rows
    other = tile.rows if tile.variant == SWAPPED else tile.columns
    room = tile.stage_bytes + tile.rows * tile.columns * size // pair + _BARRIERS
    fits = room <= H200.shared_bytes // tile.ctas
    if tile.variant == SWAPPED:
        return long == LONG_ROWS.value and other in (8, 16, 32, 64, 128, 256) and fits
    return tile.variant == PLAIN and long == LONG_ROWS.value and other in (128, 256) and fits


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
    (count, n, k), pair = w.shape, 2 if activation else 1
    swapped, half, size = tile.variant == SWAPPED, CONSUMER_ROWS.value, x.element_size()
    stage = NVMMASharedLayout(_LINE, 8 * size, 2)
    weights = w.view(count * n, k)
    long, other = (weights, x) if swapped else (x, weights)
    width = tile.rows if swapped else tile.columns
    finished = [width, half // pair] if swapped else [half, width // pair]
    slot = NVMMASharedLayout(min(_LINE, finished[1] * size), 8 * size, 2)
    warp_specialised_groups[(programs,)](
        TensorDescriptor.from_tensor(long, [half, tile.depth], stage),
        TensorDescriptor.from_tensor(other, [width, tile.depth], stage),
        TensorDescriptor.from_tensor(y, finished, slot),
        w if bias is None else bias,
        blocks,
        n,
        k // tile.depth,
        WIDTH=width,
        BK=tile.depth,
        SWAPPED=swapped,
        SHARED=shared,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        STAGES=tile.stages,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
