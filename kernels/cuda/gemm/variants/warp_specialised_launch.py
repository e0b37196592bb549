"""The launches of the warp-specialised GEMM: row products folded inside a program, and columns."""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.gemm.variants.leaf_fold import MIN_FOLD_STEPS
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Fold, Shape, Variant
from tpdet.kernels.cuda.gemm.variants.warp_specialised import warp_specialised_fold
from tpdet.kernels.cuda.gemm.variants.warp_specialised_parts import (
    COLUMNS,
    REST,
    WIDE,
    warp_specialised_parts,
)
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.launch.warp_pipeline import CONSUMER_ROWS, tile_layout

_DEPTH = 64  # of a step: a row of a stage is then one swizzled line of 128 bytes
_BARRIERS = 1024  # bytes
_SUM_BYTES = 4  # of an fp32 sum


def run_gluon_fold(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, form: RootForm, tile: Tile, sms: int
) -> None:
    """x [M, L * K], w [L, N, K], both of 2 bytes -> y [at least form.roots, M, N] fp32, filled.

    Of the tile, its size (128 x 128 by 64) and the stages count. sms: programs at most. Raises
    ValueError where it does not fit (leaves of one step, for one).
    """
    k = w.shape[2]
    if not folds(form, k, tile):
        raise ValueError(f"leaves of {k} by {tile} do not fit 'gluon': fold them otherwise")
    if sms < 1 or x.element_size() != 2:
        raise ValueError(f"'gluon' takes 2-byte values by descriptors: {x.dtype}, {sms} programs")
    sent = slots_bytes(tile, y.element_size()) <= H200.shared_bytes
    apart = (
        form.roots == 1 or x.shape[0] % CONSUMER_ROWS.value == 0
    )  # no tile reaches into the next root
    _launch(x, w, None, y, form, tile, sms, sent and apart, 0)


def run_gluon_column(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    sms: int,
    gated: int = 0,
) -> None:
    """x [M, K], w [1, N, K], bias [N] or None -> y [1, M, N], filled; all values of 2 bytes.

    gated: above 0, w and bias are interleaved, and y is [1, M, N / 2].
    Raises ValueError for several leaves, another type, and a tile that does not fit.
    """
    (leaves, n, k), sizes = w.shape, {t.element_size() for t in (x, w, y)}
    shape = Shape(x.shape[0], n, k, leaves, 2, gated > 0)
    if sizes != {2} or sms < 1 or not takes(shape, tile):
        raise ValueError(
            f"{tile} takes one leaf of 2-byte values, columns by eights and steps of {_DEPTH}: "
            f"{leaves} of {x.dtype} to {y.dtype}, {n} columns, K = {k}, {sms} programs: take "
            "another tile"
        )
    if slots_bytes(tile, shape.column_bytes) > H200.shared_bytes:
        raise ValueError(f"{tile} takes more shared memory than there is: take another tile")
    if tile.columns == COLUMNS.value:
        _launch_parts(x, w, bias, y, tile, sms, gated)
    else:
        _launch(x, w, bias, y, RootForm(1, 1, 1, 1), tile, sms, True, gated)


def _launch_parts(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    sms: int,
    gated: int,
) -> None:
    (_, n, k), m, pair = w.shape, x.shape[0], 2 if gated else 1
    rows, depth, size = CONSUMER_ROWS.value, tile.depth, x.element_size()
    stage = tile_layout(depth * size, 8 * size)
    w_tiles, y_tiles = [], []
    for columns in (WIDE.value, REST.value):
        width = columns // pair
        slot = tile_layout(min(width * size, depth * size), 8 * size)
        w_tiles.append(TensorDescriptor.from_tensor(w.view(n, k), [columns, depth], stage))
        y_tiles.append(TensorDescriptor.from_tensor(y.view(m, n // pair), [rows, width], slot))
    blocks = cdiv(m, tile.rows) * cdiv(n, tile.columns)
    warp_specialised_parts[(min(sms, blocks),)](
        TensorDescriptor.from_tensor(x, [rows, depth], stage),
        *w_tiles,
        *y_tiles,
        w if bias is None else bias,
        m,
        n,
        k // depth,
        BK=depth,
        HAS_BIAS=bias is not None,
        GATED=gated,
        STAGES=tile.stages,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    form: RootForm,
    tile: Tile,
    sms: int,
    sent: bool,
    gated: int,
) -> None:
    (leaves, n, k), m, pair = w.shape, x.shape[0], 2 if gated else 1
    rows, columns, depth = CONSUMER_ROWS.value, tile.columns, tile.depth
    line = depth * x.element_size()  # bytes that are swizzled together
    stage = tile_layout(line, 8 * x.element_size())
    slot = tile_layout(line, 8 * y.element_size())
    x_tiles = TensorDescriptor.from_tensor(x, [rows, depth], stage)
    w_tiles = TensorDescriptor.from_tensor(w.view(leaves * n, k), [columns, depth], stage)
    y_tiles = TensorDescriptor.from_tensor(y.view(-1, n // pair), [rows, columns // pair], slot)
    blocks = form.roots * cdiv(m, tile.rows) * cdiv(n, columns)
    warp_specialised_fold[(min(sms, blocks),)](
        x_tiles,
        w_tiles,
        y_tiles,
        y,
        w if bias is None else bias,
        m,
        n,
        form.roots,
        k // depth,
        COLUMNS=columns,
        BK=depth,
        GROUPS=form.groups,
        PARTS=form.parts,
        PAIR=form.pair,
        EVEN=n % columns == 0,
        SENT=sent,
        HAS_BIAS=bias is not None,
        GATED=gated,
        STAGES=tile.stages,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )


def folds(form: RootForm, k: int, tile: Tile) -> bool:
    """Whether it folds leaves of width k of this form by this tile."""
    several = form.leaves > 1 and k // tile.depth >= MIN_FOLD_STEPS
    rests = form.parts == 2 and form.groups > 1  # the first terms rest in the slot of the tile
    room = slots_bytes(tile, _SUM_BYTES) if rests else stages_bytes(tile)
    return several and tile.columns == 128 and cut_for_it(k, tile) and room <= H200.shared_bytes


def takes(shape: Shape, tile: Tile) -> bool:
    """Whether it computes a column product of this shape by this tile."""
    one = shape.leaves == 1 and shape.out_bytes == 2 and shape.n % (16 if shape.gated else 8) == 0
    return one and cut_for_it(shape.k, tile)


def cut_for_it(k: int, tile: Tile) -> bool:
    """Whether two warpgroups take this tile, for a chain of depth k."""
    steps = tile.depth == _DEPTH and k % tile.depth == 0
    plain = tile.variant in ("descriptor", "warp_specialised")
    return tile.rows == 128 and tile.columns in (128, COLUMNS.value, 256) and plain and steps


def stages_bytes(tile: Tile) -> int:
    """Shared memory of stages and barriers."""
    return tile.stage_bytes + _BARRIERS


def slots_bytes(tile: Tile, size: int) -> int:
    """The same with slots for a finished tile of values of `size` bytes."""
    return stages_bytes(tile) + tile.rows * tile.columns * size


WARP_SPECIALISED = Variant(
    "warp_specialised", "tma trades", run_gluon_column, True, slots_bytes, takes
)
WARP_SPECIALISED_FOLD = Fold(
    "gluon", run_gluon_fold, folds, step_cost=0.75, leaf_cost=0.1, static_rows=257, wgmma=True
)
